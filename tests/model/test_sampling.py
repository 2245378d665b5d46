"""The sampler on fixed logits against the plain definition in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jorca.model.sampling import RowSampling, finite_rows, logprobs, sample
from oracle.numpy_sampling import kept, probabilities

VOCAB = 50
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_k": 7},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": VOCAB + 5},
    {"temperature": 0.8, "top_p": 0.6},
    {"temperature": 1.3, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.7, "min_p": 0.03},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 1.0},
]


def rows(settings, seeds, positions):
    def column(name, default, dtype):
        return jnp.array([s.get(name, default) for s in settings], dtype)

    return RowSampling(
        temperature_r=column("temperature", 0, jnp.float32),
        top_k_r=column("top_k", 0, jnp.int32),
        top_p_r=column("top_p", 1, jnp.float32),
        min_p_r=column("min_p", 0, jnp.float32),
        seed_r2=jnp.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], jnp.uint32),
        position_r=jnp.array(positions, jnp.int32),
    )


run = jax.jit(sample, static_argnames="row_block")


def draws(logits, setting, count, row_block=32, seed=0):
    """Tokens of `count` rows with the same logits and settings, seeds 0, 1, 2, ..."""
    many = jnp.tile(jnp.asarray(logits, jnp.float32)[None], (count, 1))
    sampling = rows([setting] * count, range(seed, seed + count), [3] * count)
    return np.asarray(run(many, sampling, row_block=row_block))


def some_logits(seed=0):
    return np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_20000_draws_have_the_distribution_of_the_definition(setting):
    logits, count = some_logits(), 20_000
    right = probabilities(logits, **setting)
    seen = np.bincount(draws(logits, setting, count, row_block=500), minlength=VOCAB)
    assert seen[right == 0].sum() == 0
    # Chi-square over cells that expect five or more, the rest in one cell.
    expected = right * count
    big = expected >= 5
    cells = [(seen[i], expected[i]) for i in np.flatnonzero(big)]
    if expected[~big].sum() > 0:
        cells.append((seen[~big].sum(), max(expected[~big].sum(), 1)))
    statistic = sum((s - e) ** 2 / e for s, e in cells)
    freedom = len(cells) - 1
    # Wilson and Hilferty's approximation of the quantile at 1 - 1e-5 (z = 4.265).
    limit = freedom * (1 - 2 / (9 * freedom) + 4.265 * np.sqrt(2 / (9 * freedom))) ** 3 if freedom else 0
    assert statistic <= limit


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
    decimals=st.sampled_from([0, 5]),
)
def test_no_draw_leaves_the_set_that_the_definition_keeps_and_all_of_it_is_reached(
    seed, temperature, top_k, top_p, min_p, decimals
):
    # Rounded logits have many ties, which go to the lowest id.
    logits = np.random.default_rng(seed).normal(0, 1.5, 8).round(decimals).astype(np.float32)
    setting = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    mask, other = (
        kept(logits, temperature, top_k, min(1.0, top_p * factor), min_p) for factor in (1 - 1e-6, 1 + 1e-6)
    )
    assume(
        np.array_equal(mask, other)
    )  # where p falls on a sum within float32's rounding, either set is right
    seen = np.bincount(draws(logits, setting, 400, seed=seed), minlength=8) > 0
    likely = probabilities(logits, **setting) > 0.03  # not seen in 400 draws: 5e-6
    assert not (seen & ~mask).any()
    assert not (likely & ~seen).any()


def test_greedy_takes_the_lowest_id_among_ties():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, [7, 31]] = 2.0
    logits[1, [49, 48]] = 1.0
    sampling = rows([{}] * 3, [0] * 3, [0] * 3)
    assert run(jnp.asarray(logits), sampling, row_block=1).tolist() == [7, 48, 0]


def test_top_k_ties_go_to_the_lowest_ids():
    logits = np.full(VOCAB, -9.0, np.float32)
    logits[[4, 11, 20, 33]] = 1.0
    assert set(draws(logits, {"temperature": 1.0, "top_k": 2}, 200).tolist()) == {4, 11}


def test_top_p_ties_go_to_the_lowest_ids():
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[4, 11, 20, 33]] = 1.0
    assert set(draws(logits, {"temperature": 1.0, "top_p": 0.51}, 300).tolist()) == {4, 11, 20}


@pytest.mark.parametrize("row_block", [1, 3, 8])
def test_rows_of_mixed_settings_are_the_rows_alone_whatever_their_place(row_block):
    rng = np.random.default_rng(1)
    mixed = [{}, *SETTINGS, {}]
    logits = rng.normal(0, 2, (len(mixed), VOCAB)).astype(np.float32)
    seeds, positions = rng.integers(0, 2**62, len(mixed)).tolist(), rng.integers(0, 99, len(mixed)).tolist()
    alone = [
        int(run(jnp.asarray(logits[i : i + 1]), rows([s], [seeds[i]], [positions[i]]), row_block=1)[0])
        for i, s in enumerate(mixed)
    ]
    for order in (np.arange(len(mixed)), rng.permutation(len(mixed)), rng.permutation(len(mixed))):
        sampling = rows([mixed[i] for i in order], [seeds[i] for i in order], [positions[i] for i in order])
        got = run(jnp.asarray(logits[order]), sampling, row_block=row_block)
        assert got.tolist() == [alone[i] for i in order]


def test_draws_depend_on_seed_and_position_and_on_nothing_else():
    logits = jnp.tile(jnp.zeros((1, VOCAB)), (4, 1))
    setting = [{"temperature": 1.0}] * 4
    first = run(logits, rows(setting, [1, 1, 2**40 + 1, 1], [5, 6, 5, 5]), row_block=4).tolist()
    assert first[0] == first[3]
    many = {
        int(run(logits, rows(setting, [s] * 4, [p] * 4), row_block=4)[0])
        for s in (1, 2**40)
        for p in range(20)
    }
    assert len(many) > 20  # of 40 draws from 50 equal tokens


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-42])
def test_a_vanishing_temperature_is_greedy(temperature):
    logits = some_logits(3)
    assert set(draws(logits, {"temperature": temperature}, 20).tolist()) == {int(logits.argmax())}


def test_a_row_that_is_not_finite_is_found_and_disturbs_nobody():
    logits = np.random.default_rng(2).normal(size=(4, VOCAB)).astype(np.float32)
    clean = run(jnp.asarray(logits), rows([{"temperature": 1.0}] * 4, [1, 2, 3, 4], [0] * 4), row_block=2)
    for value in (np.nan, np.inf, -np.inf):
        bad = logits.copy()
        bad[1, 17] = value
        got = run(jnp.asarray(bad), rows([{"temperature": 1.0}] * 4, [1, 2, 3, 4], [0] * 4), row_block=2)
        assert finite_rows(jnp.asarray(bad)).tolist() == [True, False, True, True]
        assert np.asarray(got)[[0, 2, 3]].tolist() == np.asarray(clean)[[0, 2, 3]].tolist()
        assert 0 <= int(got[1]) < VOCAB


def test_logprobs_are_the_log_softmax_of_the_logits_best_first_and_ties_by_id():
    logits = np.random.default_rng(4).normal(size=(3, VOCAB)).astype(np.float32)
    logits[2, [5, 9]] = 8.0
    tokens = np.array([3, 49, 9], np.int32)
    chosen, best, ids = map(np.asarray, logprobs(jnp.asarray(logits), jnp.asarray(tokens)))
    exact = logits.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(chosen, exact[range(3), tokens], atol=1e-5)
    order = np.argsort(-exact, axis=-1, kind="stable")[:, : best.shape[1]]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(best, np.take_along_axis(exact, order, -1), atol=1e-5)
