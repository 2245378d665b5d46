"""One iteration in one stage as a traced function: unpack, layers, at the ends embedding and sampler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jorca.attention import Attention, AttentionMetadata, KVCache
from jorca.config import ModelConfig
from jorca.engine.buckets import Bucket
from jorca.engine.packing import Layout
from jorca.engine.records import FIELDS, RECORD
from jorca.model.adjust import RowAdjustment, RowState, adjust_logits
from jorca.model.gpt import GPT
from jorca.model.params import ModelPart
from jorca.model.sampling import RowSampling, finite_rows, logprobs, sample


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """The buffer's contents, inside the program.

    Attributes:
      token_ids_t: The token, or -1 for the one that stands in the device state at its position.
      positions_t: Position in its own sequence; 0 for padding.
      device_row_t: Row of the per-request state; `max_running` for padding.
      metadata: For attention.
      logits_row_r: Flat row whose logits are needed; 0 for padding.
      target_r: The prompt token whose log-probability is wanted, or -1 where a token is sampled.
      adjustment: What changes the logits; `row_r` is `max_running` where nothing is sampled.
      sampling: For the sampler; greedy where nothing is sampled.
      wants_logprobs: Whether any row wants log-probabilities.
    """

    token_ids_t: Int[Array, " T"]
    positions_t: Int[Array, " T"]
    device_row_t: Int[Array, " T"]
    metadata: AttentionMetadata
    logits_row_r: Int[Array, " R"]
    target_r: Int[Array, " R"]
    adjustment: RowAdjustment
    sampling: RowSampling
    wants_logprobs: Array


def unpack(layout: Layout, buffer: Int[Array, " size"]) -> StepInputs:
    """Reads a packed buffer inside a traced program."""
    part = layout.views(buffer)

    def field(name: str) -> jax.Array:
        column_r = part["record"][:, FIELDS.index(name)]
        return jax.lax.bitcast_convert_type(column_r, RECORD[name])

    return StepInputs(
        token_ids_t=part["token_ids"],
        positions_t=part["positions"],
        device_row_t=part["token_row"],
        metadata=AttentionMetadata(part["first_row"], part["num_rows"], part["kv_len"], part["pages"]),
        logits_row_r=part["logits_row"],
        target_r=part["target"],
        adjustment=RowAdjustment(
            row_r=part["device_row"],
            position_r=part["position"],
            num_prompt_r=field("num_prompt"),
            repetition_r=field("repetition"),
            presence_r=field("presence"),
            frequency_r=field("frequency"),
            min_position_r=field("min_position"),
            has_lists_r=field("has_lists"),
        ),
        sampling=RowSampling(
            temperature_r=field("temperature"),
            top_k_r=field("top_k"),
            top_p_r=field("top_p"),
            min_p_r=field("min_p"),
            seed_r2=jnp.stack([field("seed_high"), field("seed_low")], axis=1),
            position_r=part["position"],
        ),
        wants_logprobs=part["wants_logprobs"][0] != 0,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step gives the host, one entry per row that needed logits.

    Attributes:
      tokens_r2: The sampled token, and 1 if the row's logits were finite.
      logprob_r: Log-probability of the token, or of the prompt's next one; zeros unless a row asked.
      top_logprobs_rk: The best log-probabilities; zeros unless a row asked.
      top_ids_rk: Their token ids.
      logits_rv: Float32 logits, or None if the engine does not return them.
    """

    tokens_r2: Int[Array, "R 2"]
    logprob_r: Float[Array, " R"]
    top_logprobs_rk: Float[Array, "R K"]
    top_ids_rk: Int[Array, "R K"]
    logits_rv: Float[Array, "R V"] | None


Step = Callable[
    [Mapping[str, Any], KVCache, RowState | None, jax.Array | None, jax.Array],
    tuple[KVCache, RowState | None, jax.Array | StepOutputs],
]
"""(params, cache, state, x_td, buffer) -> (cache, state, x_td or outputs)."""


def make_step(
    config: ModelConfig,
    part: ModelPart,
    bucket: Bucket,
    attention: Attention,
    *,
    row_block: int,
    return_logits: bool,
) -> Step:
    """Returns the step of one stage and bucket.

    The first stage embeds the buffer's tokens; any other takes the rows [T, D] of the one before it, and all
    but the last return theirs. The state is the last one's: None comes in and goes out elsewhere. The caller
    donates `cache` and `state`; both come back aliased.

    Args:
      config: The model.
      part: What the stage holds of it.
      bucket: The shape of the batch.
      attention: The implementation of selective attention.
      row_block: Rows that the sampler draws at a time (see `jorca.model.sampling.sample`).
      return_logits: Whether the outputs carry their logits.
    """
    layout = Layout(bucket)

    def step(
        params: Mapping[str, Any],
        cache: KVCache,
        state: RowState | None,
        x_td: jax.Array | None,
        buffer: jax.Array,
    ) -> tuple[KVCache, RowState | None, jax.Array | StepOutputs]:
        inputs = unpack(layout, buffer)
        prepared = attention.prepare(inputs.metadata, num_tokens=bucket.num_tokens, page_size=cache.page_size)

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, cache: KVCache, layer: int, scale: float
        ) -> tuple[jax.Array, KVCache]:
            return attention(q, k, v, cache, layer, prepared, scale=scale)

        ids_t, positions_t = inputs.token_ids_t, inputs.positions_t
        if state is not None:
            place_t = inputs.device_row_t, positions_t
            if part.has_embed:  # a token that the host has not seen yet stands in the state
                known_t = state.tokens_nc.at[place_t].get(mode="clip")
                ids_t = jnp.where(ids_t < 0, known_t, ids_t)
            state = dataclasses.replace(state, tokens_nc=state.tokens_nc.at[place_t].set(ids_t, mode="drop"))

        model = GPT(config, params, part)
        if x_td is None:
            x_td = model.enter(ids_t, positions_t)
        x_td, cache = model.run_layers(x_td, positions_t, cache, attend)
        if state is None:
            return cache, None, x_td
        logits_rv = model.logits(model.leave(x_td)[inputs.logits_row_r])
        state, outputs = _choose(logits_rv, inputs, state, row_block)
        return cache, state, outputs if return_logits else dataclasses.replace(outputs, logits_rv=None)

    return step


def _choose(
    logits_rv: jax.Array, inputs: StepInputs, state: RowState, row_block: int
) -> tuple[RowState, StepOutputs]:
    """Samples a token for every row and notes it in the state."""
    finite_r = finite_rows(logits_rv).astype(jnp.int32)
    adjusted_rv = adjust_logits(logits_rv, inputs.adjustment, state)
    tokens_r = sample(adjusted_rv, inputs.sampling, row_block=row_block)
    place_r = inputs.adjustment.row_r, inputs.adjustment.position_r
    tokens_nc = state.tokens_nc.at[place_r].set(tokens_r, mode="drop")
    state = dataclasses.replace(state, tokens_nc=tokens_nc)

    wanted_r = jnp.where(inputs.target_r < 0, tokens_r, inputs.target_r)
    logprob_r, top_rk, ids_rk = jax.lax.cond(
        inputs.wants_logprobs, logprobs, _no_logprobs, logits_rv, wanted_r
    )
    return state, StepOutputs(jnp.stack([tokens_r, finite_r], axis=1), logprob_r, top_rk, ids_rk, logits_rv)


def _no_logprobs(logits_rv: jax.Array, tokens_r: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Zeros in the shapes of `logprobs`."""
    shapes = jax.eval_shape(logprobs, logits_rv, tokens_r)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
