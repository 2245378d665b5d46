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
from jorca.model.gpt import GPT
from jorca.model.sampling import finite_rows, logprobs, sample


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class RowState:
    """What lives on the device for each resident request; donated to every step.

    Attributes:
      last_token_n: The token last sampled, for iterations planned before the host has seen it.
    """

    last_token_n: Int[Array, " max_running"]

    @classmethod
    def allocate(cls, max_running: int) -> RowState:
        """Returns a zeroed state."""
        return cls(jnp.zeros(max_running, jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step gives the host, one entry per row that needed logits.

    Attributes:
      tokens_r2: The sampled token, and 1 if the row's logits were finite.
      logprob_r: Log-probability of the token; zeros unless a row asked.
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

        ids_t = inputs.token_ids_t
        ids_t = jnp.where(ids_t < 0, jnp.take(state.last_token_n, -1 - ids_t, mode="clip"), ids_t)
        model = GPT(config, params)
        x_td, cache = model(ids_t, inputs.positions_t, cache, attend)
        logits_rv = model.logits(x_td[inputs.logits_row_r])
        tokens_r = sample(logits_rv, inputs.sampling, row_block=row_block)
        state = RowState(state.last_token_n.at[inputs.device_row_r].set(tokens_r, mode="drop"))
        finite_r = finite_rows(logits_rv).astype(jnp.int32)
        logprob_r, top_rk, ids_rk = jax.lax.cond(
            inputs.wants_logprobs,
            logprobs,
            lambda *args: jax.tree.map(
                lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(logprobs, *args)
            ),
            logits_rv,
            tokens_r,
        )
        tokens_r2 = jnp.stack([tokens_r, finite_r], axis=1)
        outputs = StepOutputs(tokens_r2, logprob_r, top_rk, ids_rk, logits_rv if return_logits else None)
        return cache, state, outputs

    return step
