"""The learning rate, AdamW and clipping against their definitions, and a mesh against one device."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from jorca.config import ConfigError
from jorca.training import TrainConfig
from jorca.training.step import (
    batch_sharding,
    init_state,
    learning_rates,
    make_mesh,
    make_optimizer,
    make_step,
)

CONFIG = TrainConfig(
    vocab_size=32,
    layers=1,
    heads=4,
    width=16,
    context=8,
    batch_size=8,
    steps=20,
    warmup_steps=4,
    learning_rate=0.02,
    weight_decay=0.3,
    clip_norm=0.5,
    dropout=0.2,
)


def rate(step):
    if step < CONFIG.warmup_steps:
        return 0.02 * step / 4
    return 0.02 * (1 + math.cos(math.pi * (step - 4) / 16)) / 2


def test_the_learning_rate_rises_in_a_line_and_falls_in_a_cosine():
    rates = learning_rates(CONFIG)
    np.testing.assert_allclose(
        np.array([rates(i) for i in range(21)]), [rate(i) for i in range(21)], rtol=1e-5, atol=1e-9
    )


def is_matrix(name):
    return name.rpartition(".")[2] in ("kernel", "tokens", "positions")


@pytest.mark.parametrize("gradient_size", [1e-4, 1.0])
def test_updates_are_those_of_adamw_with_decay_on_matrices_alone(gradient_size):
    rng = np.random.default_rng(0)
    params = init_state(CONFIG, make_mesh(CONFIG)).params
    optimizer = make_optimizer(CONFIG)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    mine = {name: np.asarray(p) for name, p in params.items()}
    w = {name: np.asarray(p, np.float64) for name, p in params.items()}
    m, v = ({name: np.zeros(p.shape) for name, p in params.items()} for _ in range(2))
    for t in range(3):
        drawn = {name: gradient_size * rng.normal(size=p.shape) for name, p in params.items()}
        with jax.numpy_dtype_promotion("standard"):
            updates, state = update({k: g.astype(np.float32) for k, g in drawn.items()}, state, mine)
        mine = {name: mine[name] + np.asarray(updates[name]) for name in mine}
        length = math.sqrt(sum((g**2).sum() for g in drawn.values()))
        for name, gradient in drawn.items():
            g = gradient * min(1, CONFIG.clip_norm / length)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.99 * v[name] + 0.01 * g**2
            towards = (m[name] / (1 - 0.9 ** (t + 1))) / (np.sqrt(v[name] / (1 - 0.99 ** (t + 1))) + 1e-8)
            w[name] = w[name] - rate(t) * (towards + CONFIG.weight_decay * w[name] * is_matrix(name))
    for name in mine:
        np.testing.assert_allclose(mine[name], w[name], rtol=1e-4, atol=1e-6, err_msg=name)


def losses_on(config, windows):
    mesh = make_mesh(config)
    state, step = init_state(config, mesh), make_step(config, mesh)
    losses = []
    for batch in windows:
        state, loss = step(state, jax.device_put(batch, batch_sharding(mesh)))
        losses.append(float(loss))
    return np.array(losses), state


@pytest.fixture(scope="module")
def windows():
    """The same batch, over and over, so that there is something to learn."""
    return [np.random.default_rng(1).integers(0, 32, (8, 9)).astype(np.int32)] * 12


@pytest.fixture(scope="module")
def on_one_device(windows):
    return losses_on(CONFIG, windows)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("data_parallel", "tensor"),
    [(2, 4), *(pytest.param(*sizes, marks=slow) for sizes in [(4, 2), (8, 1), (1, 4), (1, 2)])],
)
def test_a_mesh_gives_the_losses_of_one_device(windows, on_one_device, data_parallel, tensor):
    config = dataclasses.replace(CONFIG, data_parallel=data_parallel, tensor=tensor)
    losses, state = losses_on(config, windows)
    np.testing.assert_allclose(losses, on_one_device[0], rtol=1e-5)
    assert on_one_device[0][-1] < on_one_device[0][0] - 0.1
    # The split is real, for the optimizer's moments as well.
    kernels = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (16, 3, 4, 4)]
    assert len(kernels) == 3 * CONFIG.layers
    assert {k.addressable_shards[0].data.shape for k in kernels} == {(16, 3, 4 // tensor, 4)}


def test_bfloat16_learns_nearly_the_same(windows, on_one_device):
    losses, state = losses_on(dataclasses.replace(CONFIG, dtype="bfloat16"), windows)
    np.testing.assert_allclose(losses, on_one_device[0], rtol=0.02)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}


def test_the_loss_before_the_first_update_is_nearly_that_of_a_uniform_guess(on_one_device):
    assert on_one_device[0][0] == pytest.approx(math.log(32), abs=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_parallel": 8, "tensor": 2}, "at most the number of devices, 8, got 8 . 2"),
        ({"tensor": 3}, "sizes that do: 1, 2, 4"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(changes, message):
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(ConfigError, match=message):
        init_state(config, make_mesh(config))
