"""Losses and gradients against a GPT in plain numpy, and nats per byte against their definition."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jorca.config import ConfigError, ModelConfig
from jorca.training import TrainingError
from jorca.training.evaluate import nats_per_byte
from jorca.training.loss import next_token_nll
from oracle.numpy_gpt import forward, random_params

CONTEXT = 6
CONFIG = ModelConfig(vocab_size=17, max_positions=CONTEXT, num_layers=2, num_heads=2, d_model=8)
UNTIED = ModelConfig(
    vocab_size=17,
    padded_vocab_size=20,
    max_positions=CONTEXT,
    num_layers=1,
    num_heads=1,
    d_model=8,
    use_bias=False,
    tie_embeddings=False,
    activation="gelu_erf",
)
WINDOWS = np.random.default_rng(0).integers(0, 17, (3, CONTEXT + 1)).astype(np.int32)


def oracle_nll(config, params, window):
    """-log p of each token of a window but its first, by numpy in float64."""
    logits = forward(config, params, window[:-1])[:, : config.vocab_size]
    logits = logits - logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -log_p[np.arange(len(window) - 1), window[1:]]


def nll(config, params, windows, **options):
    return next_token_nll(config, params, windows[:, :-1], windows[:, 1:], **options)


def on_device(params):
    return {name: jnp.asarray(weight) for name, weight in params.items()}


@pytest.mark.parametrize("config", [CONFIG, UNTIED])
def test_the_loss_of_each_token_is_that_of_the_definition(config):
    params = random_params(config, seed=1)
    expected = [oracle_nll(config, params, window) for window in WINDOWS]
    np.testing.assert_allclose(nll(config, on_device(params), WINDOWS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [CONFIG, UNTIED])
def test_the_gradient_is_the_slope_of_the_definition_in_any_direction(config):
    params = random_params(config, seed=2)
    gradient = jax.grad(lambda p: nll(config, p, WINDOWS).mean())(on_device(params))
    rng = np.random.default_rng(3)
    for _ in range(4):
        towards = {name: rng.normal(size=weight.shape) for name, weight in params.items()}

        def along(step, towards=towards):
            moved = {
                name: weight.astype(np.float64) + step * towards[name] for name, weight in params.items()
            }
            return np.mean([oracle_nll(config, moved, window) for window in WINDOWS])

        slope = (along(1e-6) - along(-1e-6)) / 2e-6
        mine = sum(float(np.sum(np.asarray(gradient[name], np.float64) * towards[name])) for name in params)
        assert mine == pytest.approx(slope, rel=1e-4, abs=1e-5)


def test_windows_of_a_batch_do_not_see_each_other():
    params = on_device(random_params(CONFIG, seed=1))
    others = WINDOWS.copy()
    others[[0, 2]] = (others[[0, 2]] + 1) % 17
    np.testing.assert_array_equal(nll(CONFIG, params, WINDOWS)[1], nll(CONFIG, params, others)[1])


def test_bfloat16_stays_near_float32_and_the_weights_are_rounded_first():
    params = random_params(CONFIG, seed=1)
    half = ModelConfig(
        vocab_size=17, max_positions=CONTEXT, num_layers=2, num_heads=2, d_model=8, dtype="bfloat16"
    )
    rounded = {name: jnp.asarray(weight, jnp.bfloat16) for name, weight in params.items()}
    losses = nll(half, on_device(params), WINDOWS)
    np.testing.assert_array_equal(losses, nll(half, rounded, WINDOWS))
    expected = [oracle_nll(CONFIG, params, window) for window in WINDOWS]
    np.testing.assert_allclose(losses, expected, rtol=0.1, atol=0.1)


def dropout(rate, seed):
    return nnx.Dropout(rate, rngs=nnx.Rngs(dropout=jax.random.key(seed)))


def test_dropout_follows_from_its_key():
    params = on_device(random_params(CONFIG, seed=1))
    first, again, other = (nll(CONFIG, params, WINDOWS, drop=dropout(0.3, seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()


def test_the_share_that_is_dropped_is_the_one_asked_for_and_is_drawn_for_each_token():
    config = ModelConfig(vocab_size=7, max_positions=64, num_layers=1, num_heads=1, d_model=64)
    params = on_device(random_params(config, seed=0))
    window = np.zeros((1, 65), np.int32)

    def loss(positions):
        moved = params | {"embed.positions": positions}
        return nll(config, moved, window, drop=dropout(0.25, 7)).sum()

    # What was dropped behind the embedding reaches nothing, so the loss does not depend on it.
    dropped = np.asarray(jax.grad(loss)(params["embed.positions"]) == 0)
    assert dropped.mean() == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / dropped.size))
    assert len(np.unique(dropped, axis=0)) == 64


@pytest.mark.parametrize("stride", [1, 2, 3, 6])
@pytest.mark.parametrize("num_tokens", [1, 2, 6, 7, 8, 13, 14, 40])
def test_nats_per_byte_score_every_token_once_from_the_window_that_the_definition_names(num_tokens, stride):
    params = random_params(CONFIG, seed=4)
    tokens = np.random.default_rng(num_tokens).integers(0, 17, num_tokens)
    nats = math.log(17)  # the first token, of which nothing is known
    for at in range(1, num_tokens):
        # Windows start at multiples of the stride; the first that reaches the token scores it.
        start = max(0, math.ceil((at - CONTEXT) / stride)) * stride
        assert at - start >= min(at, CONTEXT - stride + 1)
        nats += oracle_nll(CONFIG, params, tokens[start : at + 1])[-1]
    done = []
    mine = nats_per_byte(
        CONFIG, on_device(params), tokens, 100, stride=stride, batch_size=3, advance=done.append
    )
    assert mine == pytest.approx(nats / 100, rel=1e-5)
    assert sum(done) == num_tokens - 1


def test_the_window_moves_by_half_a_context_unless_told_otherwise():
    params = on_device(random_params(CONFIG, seed=4))
    tokens = np.arange(30) % 17
    assert nats_per_byte(CONFIG, params, tokens, 9) == nats_per_byte(CONFIG, params, tokens, 9, stride=3)


def test_what_has_no_nats_per_byte_is_refused():
    params = on_device(random_params(CONFIG, seed=4))
    for stride in (0, 7):
        with pytest.raises(ConfigError, match=f"stride must be between 1 and .* 6, got {stride}"):
            nats_per_byte(CONFIG, params, [1, 2], 2, stride=stride)
    with pytest.raises(TrainingError, match="empty"):
        nats_per_byte(CONFIG, params, [], 0)
