"""The baseline of the paper's engine benchmark: one padded batch, attention over all requests at once.

What Orca's selective batching gives up is that attention runs as one batched product. Here it does, as in
FasterTransformer: all requests of the batch are alike, their keys and values lie in dense arrays, and
every step of the batch takes all of them. The model is the same `GPT`, with another `attend`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jorca.config import ModelConfig
from jorca.model.gpt import GPT
from jorca.model.sampling import RowSampling, sample


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class DenseCache:
    """Keys and values of a batch, an array for each layer; donated to every step.

    Attributes:
      keys_bnsh: One [B, N, S, H] per layer, S being the longest that a request can get.
      values_bnsh: Likewise.
    """

    keys_bnsh: tuple[Float[Array, "B N S H"], ...]
    values_bnsh: tuple[Float[Array, "B N S H"], ...]

    @classmethod
    def allocate(cls, model: ModelConfig, batch_size: int, max_length: int) -> Self:
        """Returns zeroed arrays of `max_length` slots for each request."""
        shape = (batch_size, model.num_heads, max_length, model.head_dim)
        keys, values = (
            tuple(jnp.zeros(shape, model.dtype) for _ in range(model.num_layers)) for _ in range(2)
        )
        return cls(keys, values)

    def write(self, layer: int, start: jax.Array, k_bnth: jax.Array, v_bnth: jax.Array) -> DenseCache:
        """Returns the cache with the keys and values of one layer written from position `start` on."""

        def put(arrays: tuple[Array, ...], new: jax.Array) -> tuple[Array, ...]:
            written = jax.lax.dynamic_update_slice_in_dim(arrays[layer], new, start, axis=2)
            return (*arrays[:layer], written, *arrays[layer + 1 :])

        return DenseCache(put(self.keys_bnsh, k_bnth), put(self.values_bnsh, v_bnth))


Step = Callable[[Mapping[str, Any], DenseCache, jax.Array, jax.Array], tuple[DenseCache, jax.Array]]


def make_batched_step(config: ModelConfig, batch_size: int, num_tokens: int) -> Step:
    """Returns a step: (params, cache, token_ids [B * T], start) -> (cache, the next token of each request).

    The caller donates `cache`. Tokens are greedy, chosen as the engine does it. With several tokens to each
    request it is the first pass, which attends to the prompt alone; with one, it attends to all S
    slots of the cache, those behind `start` masked.

    Args:
      config: The model.
      batch_size: Requests, B.
      num_tokens: Tokens that each of them feeds: the prompt, from position 0, or 1.
    """
    greedy = RowSampling(
        temperature_r=jnp.zeros(batch_size),
        top_k_r=jnp.zeros(batch_size, jnp.int32),
        top_p_r=jnp.ones(batch_size),
        min_p_r=jnp.zeros(batch_size),
        seed_r2=jnp.zeros((batch_size, 2), jnp.uint32),
        position_r=jnp.zeros(batch_size, jnp.int32),
    )

    def step(
        params: Mapping[str, Any], cache: DenseCache, token_ids: Int[Array, " B*T"], start: Int[Array, ""]
    ) -> tuple[DenseCache, Int[Array, " B"]]:
        at_t = start + jnp.arange(num_tokens, dtype=jnp.int32)

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, cache: DenseCache, layer: int, scale: float
        ) -> tuple[jax.Array, DenseCache]:
            q_bnth, k_bnth, v_bnth = (
                x.reshape(batch_size, num_tokens, *x.shape[1:]).swapaxes(1, 2) for x in (q, k, v)
            )
            cache = cache.write(layer, start, k_bnth, v_bnth)
            if num_tokens == 1:
                k_bnth, v_bnth = cache.keys_bnsh[layer], cache.values_bnsh[layer]
            o_bnth = _attend_batched(q_bnth, k_bnth, v_bnth, at_t, scale)
            return o_bnth.swapaxes(1, 2).reshape(q.shape), cache

        model = GPT(config, params)
        x_td, cache = model(token_ids, jnp.tile(at_t, batch_size), cache, attend)
        last_bd = x_td.reshape(batch_size, num_tokens, -1)[:, -1]
        return cache, sample(model.logits(last_bd), greedy, row_block=1)

    return step


def _attend_batched(
    q_bnth: jax.Array, k_bnsh: jax.Array, v_bnsh: jax.Array, at_t: jax.Array, scale: float
) -> jax.Array:
    """Attends causally over slots 0 to S - 1, with rows at positions `at_t`; softmax in float32."""
    if at_t.size == 1 and q_bnth.dtype != jnp.float32:
        # As in the model's linear layers: XLA's CPU compiler is four times as fast with two rows as with one.
        q_bnth, at_t = jnp.repeat(q_bnth, 2, axis=2), jnp.repeat(at_t, 2)
        return _attend_batched(q_bnth, k_bnsh, v_bnsh, at_t, scale)[:, :, :1]
    scores_bnts = jnp.einsum("bnth,bnsh->bnts", q_bnth, k_bnsh, preferred_element_type=jnp.float32) * scale
    seen_ts = jnp.arange(k_bnsh.shape[2], dtype=jnp.int32)[None, :] <= at_t[:, None]
    weights_bnts = jax.nn.softmax(jnp.where(seen_ts[None, None], scores_bnts, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bnsh->bnth", weights_bnts.astype(v_bnsh.dtype), v_bnsh)


class BatchRun(NamedTuple):
    """One run of a batch from its prompts to its end.

    Attributes:
      tokens_bo: What each request generated.
      first_s: Seconds of the first step, that of the prompts.
      rest_s: Seconds of all others.
    """

    tokens_bo: np.ndarray
    first_s: float
    rest_s: float


class PaddedBatch:
    """Runs a batch of like requests from prompt to end, as one.

    Args:
      config: The model.
      params: Its weights by name.
      batch_size: Requests, B.
      num_input: Tokens of each prompt.
      num_output: Tokens that each request generates, at least 2.
      max_length: Slots of each request in the cache, at least num_input + num_output - 1.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Mapping[str, jax.Array],
        *,
        batch_size: int,
        num_input: int,
        num_output: int,
        max_length: int,
    ) -> None:
        self._params, self._num_output = params, num_output
        self._cache = DenseCache.allocate(config, batch_size, max_length)

        def compiled(num_tokens: int) -> Any:
            ids = jax.ShapeDtypeStruct((batch_size * num_tokens,), jnp.int32)
            start = jax.ShapeDtypeStruct((), jnp.int32)
            step = jax.jit(make_batched_step(config, batch_size, num_tokens), donate_argnums=1)
            return step.lower(params, self._cache, ids, start).compile()

        self._first, self._next = compiled(num_input), compiled(1)

    def run(self, prompts_bt: np.ndarray, clock: Callable[[], float] = time.perf_counter) -> BatchRun:
        """Runs the batch whose prompts are `prompts_bt`, int32 [B, num_input].

        Like FasterTransformer it hands tokens from step to step on the device, and waits for the first and
        the last alone.
        """
        num_input = prompts_bt.shape[1]
        begin_s = clock()
        self._cache, token_b = self._first(self._params, self._cache, prompts_bt.reshape(-1), np.int32(0))
        token_b.block_until_ready()
        first_s = clock()
        tokens = [token_b]
        for position in range(num_input, num_input + self._num_output - 1):
            self._cache, token_b = self._next(self._params, self._cache, token_b, np.int32(position))
            tokens.append(token_b)
        token_b.block_until_ready()
        return BatchRun(np.stack(tokens, axis=1), first_s - begin_s, clock() - first_s)
