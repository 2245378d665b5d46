"""How well a model predicts a text, in nats per byte: comparable whatever the vocabulary.

A window slides over the tokens. The first window scores all of its targets, each later one the last
`stride`, so that every token is scored once, with at least `context - stride` tokens before it wherever
the text has them. The very first token has nothing before it; it costs log V.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Float, Int

from jorca.config import ConfigError, ModelConfig
from jorca.training.errors import TrainingError
from jorca.training.loss import next_token_nll


def nats_per_byte(
    config: ModelConfig,
    params: Mapping[str, Float[Array, ...]],
    token_ids: Sequence[int] | Int[np.ndarray, " T"],
    num_bytes: int,
    *,
    stride: int | None = None,
    batch_size: int = 16,
    sharding: Sharding | None = None,
    advance: Callable[[int], None] | None = None,
) -> float:
    """Returns -log p of a text under the model, in nats, divided by its bytes.

    Args:
      config: The model, in the dtype in which it shall compute; its windows are `max_positions` long.
      params: Every weight of the parameter table by name.
      token_ids: The text's tokens, T >= 1.
      num_bytes: The text's length in bytes, at least 1.
      stride: Tokens by which the window moves, 1 <= stride <= `max_positions`; None is half of that.
      batch_size: Windows in a batch.
      sharding: Where the batches go; None leaves it to JAX.
      advance: Called with the number of tokens of each batch that are done.

    Raises:
      TrainingError: The text is empty.
      ConfigError: The stride is not in its range.
    """
    context = config.max_positions
    stride = max(context // 2, 1) if stride is None else stride
    if not 1 <= stride <= context:
        raise ConfigError(f"stride must be between 1 and the model's context, {context}, got {stride}")
    if not len(token_ids) or num_bytes < 1:
        raise TrainingError("the text is empty, so it has no nats per byte")
    nats = math.log(config.vocab_size)  # of the first token
    for inputs, targets, scored in _batches(np.asarray(token_ids, np.int32), context, stride, batch_size):
        batch = jax.device_put((inputs, targets, scored), sharding)
        nats += float(_scored_nats(config, dict(params), *batch))
        if advance is not None:
            advance(int(scored.sum()))
    return nats / num_bytes


@functools.partial(jax.jit, static_argnums=0)
def _scored_nats(
    config: ModelConfig,
    params: Mapping[str, Array],
    inputs_bs: Int[Array, "B S"],
    targets_bs: Int[Array, "B S"],
    scored_bs: Bool[Array, "B S"],
) -> Float[Array, ""]:
    return jnp.where(scored_bs, next_token_nll(config, params, inputs_bs, targets_bs), 0.0).sum()


def _batches(
    token_ids: Int[np.ndarray, " T"], context: int, stride: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields inputs, targets and which targets count, [batch_size, context] each.

    Windows begin at multiples of `stride` until the last token is a target. What lies behind the end is
    token 0 and does not count.
    """
    num_targets = len(token_ids) - 1
    starts = range(0, max(num_targets - context, 0) + stride, stride) if num_targets else range(0)
    for first in range(0, len(starts), batch_size):
        start_b = np.full(batch_size, num_targets)  # rows without a window count nothing
        some = starts[first : first + batch_size]
        start_b[: len(some)] = some
        at_bs = start_b[:, None] + np.arange(context)[None]
        is_new_bs = (np.arange(context) >= context - stride)[None] | (start_b == 0)[:, None]
        inputs_bs, targets_bs = (token_ids[np.minimum(at_bs + i, num_targets)] for i in (0, 1))
        yield inputs_bs, targets_bs, is_new_bs & (at_bs < num_targets)
