"""Which part of each weight lies on which device."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jorca.config import ConfigError, ModelConfig
from jorca.model.init import init_params
from jorca.model.params import param_table
from jorca.sharding import RULES, pad_vocab, param_shardings, param_specs

CONFIG = ModelConfig(
    vocab_size=61, padded_vocab_size=64, max_positions=8, num_layers=2, num_heads=4, d_model=16
)
UNTIED = ModelConfig(
    vocab_size=64, max_positions=8, num_layers=1, num_heads=4, d_model=16, tie_embeddings=False
)


def mesh_of(data: int, tensor: int) -> Mesh:
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    return Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))


@pytest.mark.parametrize("config", [CONFIG, UNTIED])
def test_every_axis_of_every_weight_has_a_rule_and_no_mesh_axis_splits_a_weight_twice(config):
    specs = param_specs(config)
    assert specs.keys() == param_table(config).keys()
    for name, info in param_table(config).items():
        assert set(info.axes) <= RULES.keys()
        used = [axis for axis in specs[name] if axis is not None]
        assert len(used) == len(set(used)), name


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("config", [CONFIG, UNTIED])
def test_a_device_holds_its_share_of_heads_units_and_vocabulary_and_all_of_the_rest(config, tensor):
    n, f, v, d = 4 // tensor, 64 // tensor, 64 // tensor, 16
    expected = {
        "tokens": (v, d),
        "positions": (8, d),
        "scale": (d,),
        "qkv.kernel": (d, 3, n, 4),
        "qkv.bias": (3, n, 4),
        "out.kernel": (n, 4, d),
        "out.bias": (d,),
        "up.kernel": (d, f),
        "up.bias": (f,),
        "down.kernel": (f, d),
        "down.bias": (d,),
        "norm.bias": (d,),
        "head.kernel": (v, d),
    }
    shardings = param_shardings(config, mesh_of(2, tensor))
    for name, info in param_table(config).items():
        (shape,) = [shape for ending, shape in expected.items() if name.endswith(ending)]
        assert shardings[name].shard_shape(info.shape) == shape, name


def test_a_device_has_queries_keys_and_values_of_its_own_heads():
    kernel = init_params(CONFIG)["layers.0.attention.qkv.kernel"]
    mesh = mesh_of(1, 4)
    placed = jax.device_put(kernel, param_shardings(CONFIG, mesh)["layers.0.attention.qkv.kernel"])
    for head, device in enumerate(mesh.devices[0]):
        (shard,) = [s for s in placed.addressable_shards if s.device == device]
        np.testing.assert_array_equal(shard.data, kernel[:, :, head : head + 1])


@pytest.mark.parametrize(
    ("changes", "tensor", "sizes"),
    [({}, 3, "1, 2, 4"), ({}, 8, "1, 2, 4"), ({"num_heads": 8, "d_ff": 12}, 8, "1, 2, 4")],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(changes, tensor, sizes):
    fields = {"vocab_size": 61, "padded_vocab_size": 64, "max_positions": 8, "num_layers": 1, "num_heads": 4}
    config = ModelConfig(**(fields | {"d_model": 16} | changes))
    with pytest.raises(ConfigError, match=re.escape(f"got tensor {tensor} with")) as caught:
        param_shardings(config, mesh_of(1, tensor))
    assert str(caught.value).endswith(f"sizes that do: {sizes}")


@pytest.mark.parametrize(("tensor", "rows"), [(1, 61), (2, 62), (4, 64), (3, 63)])
def test_a_vocabulary_gets_as_few_rows_of_padding_as_devices_need(tensor, rows):
    config = ModelConfig(vocab_size=61, max_positions=8, num_layers=1, num_heads=12, d_model=24)
    assert pad_vocab(config, tensor).padded_vocab_size == rows
    assert pad_vocab(config, tensor).vocab_size == 61
    if rows > 61:
        message = f"^padded_vocab_size must be a multiple of tensor {tensor}, got 61; use {rows}$"
        with pytest.raises(ConfigError, match=message):
            param_shardings(config, mesh_of(1, tensor))
    assert param_shardings(pad_vocab(config, tensor), mesh_of(1, tensor))
