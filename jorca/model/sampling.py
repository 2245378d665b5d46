"""Choosing tokens on the device, each row as if it were alone.

Greedy rows cost two passes over the logits. A sampled row never sorts and draws no noise per token:
whatever is asked for (the k best, the nucleus, the draw itself) is the smallest set whose weight
reaches a target, so a threshold is bisected over the bits of a float, and then over token ids for
ties. Each step of a bisection is one masked sum over the row. Sums of non-negative floats with more terms
never get smaller in a fixed order of addition, so a bisection over them is exact for what it sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jorca.request import MAX_LOGPROBS

_INFINITY_BITS = 0x7F800000


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class RowSampling:
    """`SamplingParams` of each row as arrays; a row with temperature 0 is greedy.

    Attributes:
      temperature_r: At least 0.
      top_k_r: 0 keeps all.
      top_p_r: In (0, 1].
      min_p_r: In [0, 1].
      seed_r2: The row's 64-bit seed, high word first.
      position_r: Position of the token to be chosen. A row's draw depends on its seed and this alone.
    """

    temperature_r: Float[Array, " R"]
    top_k_r: Int[Array, " R"]
    top_p_r: Float[Array, " R"]
    min_p_r: Float[Array, " R"]
    seed_r2: UInt32[Array, "R 2"]
    position_r: Int[Array, " R"]


def finite_rows(logits_rv: Float[Array, "R V"]) -> Bool[Array, " R"]:
    """Returns which rows hold nothing but finite logits."""
    return jnp.isfinite(logits_rv).all(axis=-1)


def sample(logits_rv: Float[Array, "R V"], sampling: RowSampling, *, row_block: int) -> Int[Array, " R"]:
    """Chooses a token for every row.

    Args:
      logits_rv: Float32. A row that is not finite gets some id in range; see `finite_rows`.
      sampling: How each row is sampled.
      row_block: Rows that are drawn at a time, at least 1. Only as many blocks run as there are sampled
        rows; greedy rows never enter one.

    Returns:
      Token ids, 0 <= id < V. Greedy ties go to the lowest id.
    """
    num_rows = logits_rv.shape[0]
    greedy_r = _greedy(logits_rv)
    sampled_r = sampling.temperature_r > 0
    # Sampled rows first, then a tail that points past the end: it gathers nothing and writes nowhere.
    order = jnp.argsort(~sampled_r, stable=True).astype(jnp.int32)
    count = sampled_r.sum(dtype=jnp.int32)
    order = jnp.where(jnp.arange(num_rows, dtype=jnp.int32) < count, order, num_rows)
    order = jnp.pad(order, (0, -num_rows % row_block), constant_values=num_rows)

    def draw_block(block: jax.Array, tokens_r: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice(order, (block * row_block,), (row_block,))
        take = lambda x: jnp.take(x, rows, axis=0, mode="clip")  # noqa: E731
        drawn = _draw(take(logits_rv), jax.tree.map(take, sampling))
        return tokens_r.at[rows].set(drawn, mode="drop")

    # The condition keeps the compiler from moving a block's work out of a loop that never runs.
    return jax.lax.cond(
        count > 0,
        lambda: jax.lax.fori_loop(0, -(-count // row_block), draw_block, greedy_r),
        lambda: greedy_r,
    )


def logprobs(
    logits_rv: Float[Array, "R V"], tokens_r: Int[Array, " R"]
) -> tuple[Float[Array, " R"], Float[Array, "R K"], Int[Array, "R K"]]:
    """Returns each row's log-probability of its token, and the K best with their ids, best first.

    K is the smaller of `MAX_LOGPROBS` and V. The distribution is the model's own: temperature 1, nothing
    filtered.
    """
    normal_r = jax.nn.logsumexp(logits_rv, axis=-1)
    best_rk, ids_rk = jax.lax.top_k(logits_rv, min(MAX_LOGPROBS, logits_rv.shape[-1]))
    chosen_r = jnp.take_along_axis(logits_rv, tokens_r[:, None], axis=-1)[:, 0]
    return chosen_r - normal_r, best_rk - normal_r[:, None], ids_rk


def _greedy(logits_rv: jax.Array) -> jax.Array:
    """Lowest id among the largest logits. Two plain reductions: argmax is nine times slower on CPU."""
    ids_rv = jax.lax.broadcasted_iota(jnp.int32, logits_rv.shape, 1)
    best_r1 = logits_rv.max(axis=-1, keepdims=True)
    num_ids = logits_rv.shape[-1]
    token_r = jnp.where(logits_rv == best_r1, ids_rv, num_ids).min(axis=-1)
    return jnp.where(token_r < num_ids, token_r, 0)  # a row of NaN equals nothing


def _draw(logits_bv: jax.Array, rows: RowSampling) -> jax.Array:
    """Draws one token per row of a block."""
    # Below this the best token has all the weight, and dividing zero by a subnormal number may give NaN.
    temperature_b1 = jnp.maximum(rows.temperature_r, jnp.finfo(jnp.float32).tiny)[:, None]
    # Distance below the best: 0 for the best, and its bits order the tokens as an integer would.
    distance_bv = (logits_bv.max(axis=-1, keepdims=True) - logits_bv) / temperature_b1
    order_bv = jax.lax.bitcast_convert_type(distance_bv, jnp.int32)
    weight_bv = jnp.exp(-distance_bv)

    kept_bv = _filter(order_bv, weight_bv, rows)
    weight_bv = jnp.where(kept_bv & (weight_bv >= rows.min_p_r[:, None]), weight_bv, 0)
    return _pick(weight_bv, _uniform(rows.seed_r2, rows.position_r))


def _filter(order_bv: jax.Array, weight_bv: jax.Array, rows: RowSampling) -> jax.Array:
    """Marks what top_k leaves, and of that what top_p leaves.

    Both ask for the smallest set of best tokens that reaches a target: so many tokens, or such a share of the
    weight. They are two turns of one loop, which is compiled once.
    """
    limits_k = (rows.top_k_r > 0) & (rows.top_k_r < order_bv.shape[-1])
    limits_p = rows.top_p_r < 1

    def narrow(turn: jax.Array, kept_bv: jax.Array) -> jax.Array:
        counts = turn == 0
        counted_bv = jnp.where(kept_bv, jnp.where(counts, jnp.ones_like(weight_bv), weight_bv), 0)
        share_b = rows.top_p_r * counted_bv.sum(axis=-1)
        target_b = jnp.where(counts, rows.top_k_r.astype(jnp.float32), share_b)
        wanted_b = jnp.where(counts, limits_k, limits_p)
        # A block in which no row wants it skips the work.
        return jax.lax.cond(
            wanted_b.any(),
            lambda: kept_bv & (_best(order_bv, counted_bv, target_b) | ~wanted_b[:, None]),
            lambda: kept_bv,
        )

    return jax.lax.fori_loop(0, 2, narrow, jnp.ones_like(weight_bv, bool))


def _best(order_bv: jax.Array, weight_bv: jax.Array, target_b: jax.Array) -> jax.Array:
    """Marks the smallest set of first tokens (by `order_bv`, then id) whose weight reaches the target."""
    num_rows, num_ids = order_bv.shape

    def reaches(mask_bv: jax.Array) -> jax.Array:
        return jnp.where(mask_bv, weight_bv, 0).sum(axis=-1) >= target_b

    def search(test: Callable[[jax.Array], jax.Array], limit: int) -> jax.Array:
        return _bisect(lambda at_b: reaches(test(at_b[:, None])), jnp.full(num_rows, limit, jnp.int32), limit)

    last_b = search(lambda bits: order_bv <= bits, _INFINITY_BITS)
    before_bv = order_bv < last_b[:, None]
    tied_bv = order_bv == last_b[:, None]
    ids_bv = jax.lax.broadcasted_iota(jnp.int32, order_bv.shape, 1)
    last_id_b = jax.lax.cond(
        (tied_bv.sum(axis=-1, dtype=jnp.int32) > 1).any(),
        lambda: search(lambda ids: before_bv | (tied_bv & (ids_bv <= ids)), num_ids - 1),
        lambda: jnp.full(num_rows, num_ids - 1, jnp.int32),
    )
    return before_bv | (tied_bv & (ids_bv <= last_id_b[:, None]))


def _pick(weight_bv: jax.Array, uniform_b: jax.Array) -> jax.Array:
    """Inverts the cumulative distribution over ids at `uniform_b`; a token without weight is never hit."""
    ids_bv = jax.lax.broadcasted_iota(jnp.int32, weight_bv.shape, 1)
    target_b = uniform_b * weight_bv.sum(axis=-1)
    # Should rounding keep every sum below the target, the last token that has weight is the answer.
    last_b = jnp.where(weight_bv > 0, ids_bv, 0).max(axis=-1)
    return _bisect(
        lambda ids: jnp.where(ids_bv <= ids[:, None], weight_bv, 0).sum(axis=-1) > target_b,
        last_b,
        weight_bv.shape[-1] - 1,
    )


def _bisect(reached: Callable[[jax.Array], jax.Array], high_b: jax.Array, limit: int) -> jax.Array:
    """Smallest integer in [0, high] at which a monotone test holds for each row; `high` if none does.

    `limit` is a static bound on `high_b`; it sets the number of steps.
    """

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_b, high_b = bounds
        middle_b = low_b + (high_b - low_b) // 2
        ok_b = reached(middle_b)
        return jnp.where(ok_b, low_b, jnp.minimum(middle_b + 1, high_b)), jnp.where(ok_b, middle_b, high_b)

    return jax.lax.fori_loop(0, limit.bit_length(), halve, (jnp.zeros_like(high_b), high_b))[1]


def _uniform(seed_b2: jax.Array, position_b: jax.Array) -> jax.Array:
    """One number in [0, 1) per row, a function of its seed and its position only."""

    def one(seed_2: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position), (), jnp.float32)

    return jax.vmap(one)(seed_b2, position_b)
