import dataclasses

import numpy as np
import pytest

from attention.kernels import KernelSuite
from jorca.attention.triton import TritonAttention


class TestTriton(KernelSuite):
    implementation = TritonAttention(interpret=True)

    @pytest.mark.parametrize("block_q", [16, 32, 64, 128])
    @pytest.mark.parametrize("block_kv", [16, 32, 64])
    def test_blocks_of_every_size_are_right(self, block_q, block_kv):
        rng = np.random.default_rng(3)
        batch = self.batch([self.request(rng, *s) for s in [(65, 65), (1, 129), (3, 128)]])
        self.check(batch, dataclasses.replace(self.implementation, block_q=block_q, block_kv=block_kv))
