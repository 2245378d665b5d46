"""Which layers and devices a stage gets."""

import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jorca.config import ConfigError, MeshConfig, ModelConfig
from jorca.model.params import param_table
from jorca.sharding import make_stages, spread_layers

CONFIG = ModelConfig(vocab_size=50257, max_positions=8, num_layers=5, num_heads=4, d_model=16)


@given(st.integers(1, 200), st.integers(1, 200))
def test_layers_are_spread_in_order_and_as_evenly_as_they_go(num_layers, num_stages):
    if num_stages > num_layers:
        with pytest.raises(ConfigError, match=f"^stages must be at most the model's {num_layers} layers"):
            spread_layers(num_layers, num_stages)
        return
    stages = spread_layers(num_layers, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert len(sizes) == num_stages
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_three_layers_on_two_stages_are_two_and_one():
    assert spread_layers(3, 2) == [range(2), range(2, 3)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_stages_hold_every_weight_once_and_a_tied_table_at_both_ends(num_stages, tied):
    config = ModelConfig(
        vocab_size=7, max_positions=4, num_layers=5, num_heads=1, d_model=4, tie_embeddings=tied
    )
    stages = make_stages(config, MeshConfig(stages=num_stages))
    names = [name for stage in stages for name in param_table(config, stage.part)]
    twice = {"embed.tokens"} if tied and num_stages > 1 else set()
    assert set(names) == param_table(config).keys()
    assert {name for name in names if names.count(name) > 1} == twice
    ends = [(stage.part.has_embed, stage.part.has_head) for stage in stages]
    assert ends == [(i == 0, i == num_stages - 1) for i in range(num_stages)]


def test_stages_share_no_device_and_come_in_order():
    stages = make_stages(CONFIG, MeshConfig(stages=2, tensor=4))
    devices = [device for stage in stages for device in stage.mesh.devices.flat]
    assert devices == jax.devices()[:8]
    assert [stage.index for stage in stages] == [0, 1]
    assert make_stages(CONFIG, MeshConfig(), jax.devices()[5:])[0].mesh.devices.flat[0] == jax.devices()[5]


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            {"stages": 3, "tensor": 4},
            "stages * tensor must be at most the 8 devices that there are, got 3 * 4",
        ),
        ({"stages": 6}, "stages must be at most the model's 5 layers, got 6"),
    ],
)
def test_what_does_not_go_is_refused(mesh, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        make_stages(CONFIG, MeshConfig(**mesh))
