"""What changes a row's logits before a token is chosen: penalties, biases, tokens that may not come yet.

A row is adjusted as if it were alone, from its own tokens, which live on the device (`RowState`); rows
that ask for nothing are not touched and cost nothing.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jorca.request import MAX_BANNED, MAX_LOGIT_BIAS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class RowState:
    """What lives on the device for each resident request, by its row; donated to every step.

    Attributes:
      tokens_nc: The token at each position, as far as it was fed or sampled. What lies behind that is
        left over from earlier requests and never read.
      bias_ids_nk: Token ids whose logits are biased; the vocabulary's size where there is none. Valid
        only for rows whose `RowAdjustment.has_lists_r` is set, as are the next two.
      bias_nk: What is added to them.
      banned_ids_nk: Token ids that cannot come before `RowAdjustment.min_position_r`, likewise.
    """

    tokens_nc: Int[Array, "max_running C"]
    bias_ids_nk: Int[Array, "max_running K"]
    bias_nk: Float[Array, "max_running K"]
    banned_ids_nk: Int[Array, "max_running J"]

    @classmethod
    def allocate(cls, max_running: int, max_positions: int) -> RowState:
        """Returns a state for so many rows of sequences of up to `max_positions` tokens."""
        return cls(
            jnp.zeros((max_running, max_positions), jnp.int32),
            jnp.zeros((max_running, MAX_LOGIT_BIAS), jnp.int32),
            jnp.zeros((max_running, MAX_LOGIT_BIAS), jnp.float32),
            jnp.zeros((max_running, MAX_BANNED), jnp.int32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class RowAdjustment:
    """What each row that needs logits asks for.

    Attributes:
      row_r: Its row in `RowState`.
      position_r: Position of the token to be chosen: so many tokens are known.
      num_prompt_r: How many of them are the prompt.
      repetition_r: Repetition penalty, above 0; 1 for none.
      presence_r: Presence penalty; 0 for none.
      frequency_r: Frequency penalty; 0 for none.
      min_position_r: Banned tokens cannot be chosen at positions below this.
      has_lists_r: Whether the row has biased or banned ids.
    """

    row_r: Int[Array, " R"]
    position_r: Int[Array, " R"]
    num_prompt_r: Int[Array, " R"]
    repetition_r: Float[Array, " R"]
    presence_r: Float[Array, " R"]
    frequency_r: Float[Array, " R"]
    min_position_r: Int[Array, " R"]
    has_lists_r: Int[Array, " R"]

    def wanted(self) -> jax.Array:
        """Returns which rows ask for anything, bool [R]."""
        penalised_r = (self.repetition_r != 1) | (self.presence_r != 0) | (self.frequency_r != 0)
        return penalised_r | (self.has_lists_r != 0)


def adjust_logits(
    logits_rv: Float[Array, "R V"], rows: RowAdjustment, state: RowState
) -> Float[Array, "R V"]:
    """Returns the logits from which tokens are chosen.

    In this order: repetition penalty over prompt and output (Keskar et al., CTRL, 2019), frequency and
    presence penalties over the output, biases, bans.

    Args:
      logits_rv: The model's, float32.
      rows: What each row asks for.
      state: The rows' tokens and lists.
    """
    wanted_r = rows.wanted()
    order_r = jnp.argsort(~wanted_r, stable=True)

    def adjust_next(i: jax.Array, logits_rv: jax.Array) -> jax.Array:
        r = order_r[i]
        return logits_rv.at[r].set(_adjust_row(logits_rv[r], jax.tree.map(lambda x: x[r], rows), state))

    # The condition keeps the compiler from copying the logits into a loop that never runs.
    return jax.lax.cond(
        wanted_r.any(),
        lambda: jax.lax.fori_loop(0, wanted_r.sum(dtype=jnp.int32), adjust_next, logits_rv),
        lambda: logits_rv,
    )


def _adjust_row(logits_v: jax.Array, row: RowAdjustment, state: RowState) -> jax.Array:
    """`adjust_logits` for one row; the fields of `row` are scalars."""
    vocab_size, n = logits_v.shape[0], row.row_r
    tokens_c = state.tokens_nc[n]
    at_c = jnp.arange(tokens_c.shape[0], dtype=jnp.int32)
    known_c = at_c < row.position_r
    output_c = known_c & (at_c >= row.num_prompt_r)

    def times(mask_c: jax.Array) -> jax.Array:
        """How often each token stands at the marked positions; others point past the end."""
        ids_c = jnp.where(mask_c, tokens_c, vocab_size)
        return jnp.zeros(vocab_size, jnp.float32).at[ids_c].add(1, mode="drop")

    repeated_v = jnp.where(logits_v > 0, logits_v / row.repetition_r, logits_v * row.repetition_r)
    logits_v = jnp.where(times(known_c) > 0, repeated_v, logits_v)
    count_v = times(output_c)
    logits_v = logits_v - row.frequency_r * count_v
    logits_v = logits_v - jnp.where(count_v > 0, row.presence_r, 0)
    bias_ids_k = jnp.where(row.has_lists_r != 0, state.bias_ids_nk[n], vocab_size)
    logits_v = logits_v.at[bias_ids_k].add(state.bias_nk[n], mode="drop")
    banned = (row.has_lists_r != 0) & (row.position_r < row.min_position_r)
    banned_ids_j = jnp.where(banned, state.banned_ids_nk[n], vocab_size)
    return logits_v.at[banned_ids_j].set(-jnp.inf, mode="drop")


def write_lists(
    state: RowState,
    row: Int[Array, ""],
    bias_ids_k: Int[Array, " K"],
    bias_k: Float[Array, " K"],
    banned_ids_j: Int[Array, " J"],
) -> RowState:
    """Returns the state with one row's lists written, for a request that is admitted to it."""
    return dataclasses.replace(
        state,
        bias_ids_nk=state.bias_ids_nk.at[row].set(bias_ids_k),
        bias_nk=state.bias_nk.at[row].set(bias_k),
        banned_ids_nk=state.banned_ids_nk.at[row].set(banned_ids_j),
    )
