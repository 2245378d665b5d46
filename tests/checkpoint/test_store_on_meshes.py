"""A checkpoint goes from any mesh to any other, bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jorca.checkpoint import CheckpointError, load_params, save_checkpoint
from jorca.config import ModelConfig
from jorca.model.params import param_table
from jorca.sharding import param_shardings

CONFIG = ModelConfig(
    vocab_size=61, padded_vocab_size=64, max_positions=8, num_layers=2, num_heads=8, d_model=16
)


def mesh_of(num_devices):
    return Mesh(np.array(jax.devices()[:num_devices]), ("tensor",))


@pytest.fixture(scope="module")
def weights():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(i.shape, np.float32) for name, i in param_table(CONFIG).items()}


@pytest.fixture(scope="module")
def saved(weights, tmp_path_factory):
    """Saved on four devices, each holding its part of what rules split."""
    path = tmp_path_factory.mktemp("saved") / "model"
    shardings = param_shardings(CONFIG, mesh_of(4))
    placed = {name: jax.device_put(jnp.asarray(x), shardings[name]) for name, x in weights.items()}
    assert len(placed["embed.tokens"].addressable_shards) == 4
    save_checkpoint(path, CONFIG, placed)
    return path


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_saved_on_four_devices_restored_on_another_number_bits_are_the_same(saved, weights, num_devices):
    shardings = param_shardings(CONFIG, mesh_of(num_devices))
    loaded = load_params(saved, CONFIG, shardings=shardings)
    for name, x in weights.items():
        assert loaded[name].sharding == shardings[name]
        np.testing.assert_array_equal(np.asarray(loaded[name]), x)
    parts = {shard.data.shape for shard in loaded["embed.tokens"].addressable_shards}
    assert parts == {(64 // num_devices, 16)}  # each device holds its rows and no others


def test_some_weights_alone_are_read_and_a_vocabulary_may_get_more_padding(saved, weights):
    wider = dataclasses.replace(CONFIG, padded_vocab_size=72)
    names = ["embed.tokens", "layers.1.mlp.up.kernel"]
    shardings = {name: param_shardings(wider, mesh_of(8))[name] for name in names}
    loaded = load_params(saved, wider, shardings=shardings)
    assert list(loaded) == names
    tokens = np.asarray(loaded["embed.tokens"])
    np.testing.assert_array_equal(tokens[:64], weights["embed.tokens"])
    assert tokens.shape == (72, 16)
    assert not tokens[64:].any()
    np.testing.assert_array_equal(loaded[names[1]], weights[names[1]])


def test_rows_that_are_stored_are_never_left_out(saved):
    narrower = dataclasses.replace(CONFIG, padded_vocab_size=61)
    with pytest.raises(
        CheckpointError, match=r"wrong shape: embed.tokens is \(64, 16\), .* needs \(61, 16\)"
    ):
        load_params(saved, narrower)
