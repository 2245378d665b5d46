"""One iteration as a traced function: unpack, model, sampler. One program of it per bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jorca.attention import Attention, KVCache
from jorca.config import ModelConfig
from jorca.engine.buckets import Bucket
from jorca.engine.packing import Layout
from jorca.model.adjust import RowState, adjust_logits
from jorca.model.gpt import GPT
from jorca.model.sampling import finite_rows, logprobs, sample


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


Step = Callable[[Mapping[str, Any], KVCache, RowState, jax.Array], tuple[KVCache, RowState, StepOutputs]]


def make_step(
    config: ModelConfig, bucket: Bucket, attention: Attention, *, row_block: int, return_logits: bool
) -> Step:
    """Returns the step of one bucket: (params, cache, state, buffer) -> (cache, state, outputs).

    The caller donates `cache` and `state`; both come back aliased.

    Args:
      config: The model.
      bucket: The shape of the batch.
      attention: The implementation of selective attention.
      row_block: Rows that the sampler draws at a time (see `jorca.model.sampling.sample`).
      return_logits: Whether the outputs carry their logits.
    """
    layout = Layout(bucket)

    def step(
        params: Mapping[str, Any], cache: KVCache, state: RowState, buffer: jax.Array
    ) -> tuple[KVCache, RowState, StepOutputs]:
        inputs = layout.unpack(buffer)
        prepared = attention.prepare(inputs.metadata, num_tokens=bucket.num_tokens, page_size=cache.page_size)

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, cache: KVCache, layer: int, scale: float
        ) -> tuple[jax.Array, KVCache]:
            return attention(q, k, v, cache, layer, prepared, scale=scale)

        row_t, positions_t = inputs.device_row_t, inputs.positions_t
        known_t = state.tokens_nc.at[row_t, positions_t].get(mode="clip")
        ids_t = jnp.where(inputs.token_ids_t < 0, known_t, inputs.token_ids_t)
        tokens_nc = state.tokens_nc.at[row_t, positions_t].set(ids_t, mode="drop")
        state = dataclasses.replace(state, tokens_nc=tokens_nc)

        model = GPT(config, params)
        x_td, cache = model(ids_t, positions_t, cache, attend)
        logits_rv = model.logits(x_td[inputs.logits_row_r])
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
        tokens_r2 = jnp.stack([tokens_r, finite_r], axis=1)
        outputs = StepOutputs(tokens_r2, logprob_r, top_rk, ids_rk, logits_rv if return_logits else None)
        return cache, state, outputs

    return step


def _no_logprobs(logits_rv: jax.Array, tokens_r: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Zeros in the shapes of `logprobs`."""
    shapes = jax.eval_shape(logprobs, logits_rv, tokens_r)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
