import dataclasses

import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.kernels import KernelSuite
from jorca.attention.mosaic import MosaicAttention


# The interpreter multiplies with NumPy, which warns of the NaN behind the last position of a page.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
class TestMosaic(KernelSuite):
    implementation = MosaicAttention(interpret=plgpu.InterpretGPUParams())

    @pytest.mark.parametrize("stages", [3, 4])
    def test_more_blocks_in_flight_are_right(self, stages):
        rng = np.random.default_rng(3)
        batch = self.batch([self.request(rng, *s) for s in [(65, 65), (1, 129), (3, 128)]])
        self.check(batch, dataclasses.replace(self.implementation, stages=stages))

    @pytest.mark.parametrize("splits", [1, 3])
    def test_no_copy_races_with_the_products(self, splits, capfd):
        rng = np.random.default_rng(4)
        batch = self.batch([self.request(rng, *s) for s in [(70, 130), (1, 190)]], table_positions=192)
        strict = plgpu.InterpretGPUParams(detect_races=True)
        self.check(batch, dataclasses.replace(self.implementation, splits=splits, interpret=strict))
        assert "RACE DETECTED" not in capfd.readouterr().out  # JAX 0.11 prints rather than raises
