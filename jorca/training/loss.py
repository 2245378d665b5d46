"""The loss of a batch of windows, through the very modules that serve.

The modules take flat tokens, so a batch [B, S] goes in as [B * S]; what makes its windows windows is
the attention that is handed in here: dense, causal and without a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jorca.config import ModelConfig
from jorca.model.gpt import GPT, Attend


def dense_causal_attention(batch_size: int, context: int) -> Attend:
    """Returns attention for `batch_size` windows of `context` tokens that lie end to end."""
    seen_st = jnp.tril(jnp.ones((context, context), bool))

    def attend(
        q_tnh: jax.Array, k_tnh: jax.Array, v_tnh: jax.Array, cache: Any, layer: int, scale: float
    ) -> tuple[jax.Array, Any]:
        q_bsnh, k_bsnh, v_bsnh = (x.reshape(batch_size, context, *x.shape[1:]) for x in (q_tnh, k_tnh, v_tnh))
        scores_bnst = jnp.einsum("bsnh,btnh->bnst", q_bsnh, k_bsnh, preferred_element_type=jnp.float32)
        scores_bnst = jnp.where(seen_st[None, None], scores_bnst * scale, -jnp.inf)
        weights_bnst = jax.nn.softmax(scores_bnst, axis=-1).astype(v_bsnh.dtype)
        o_bsnh = jnp.einsum("bnst,btnh->bsnh", weights_bnst, v_bsnh)
        return o_bsnh.reshape(q_tnh.shape), cache

    return attend


def next_token_nll(
    config: ModelConfig,
    params: Mapping[str, Float[Array, ...]],
    tokens_bs: Int[Array, "B S"],
    targets_bs: Int[Array, "B S"],
    *,
    drop: nnx.Dropout | None = None,
) -> Float[Array, "B S"]:
    """Returns -log p of each target, in nats and float32, given its window up to the token before it.

    Args:
      config: The model; computes in `config.dtype`, to which the weights are rounded.
      params: Every weight of the parameter table by name, float32 or the model's dtype.
      tokens_bs: What is fed; position i of a window is position i of the model.
      targets_bs: The token that follows each.
      drop: Put behind the embedding and behind each addition to the residual stream; draws anew at each.
    """
    batch_size, context = tokens_bs.shape
    params = {name: weight.astype(config.dtype) for name, weight in params.items()}
    model = GPT(config, params)
    body = GPT(config, params)  # apart from the model, whose tied head reads the embedding
    if drop is not None:
        _add_dropout(body, drop)
    positions_t = jnp.tile(jnp.arange(context), batch_size)
    x_td, _ = body(tokens_bs.reshape(-1), positions_t, None, dense_causal_attention(batch_size, context))
    logits_tv = model.logits(x_td)
    chosen_t = jnp.take_along_axis(logits_tv, targets_bs.reshape(-1, 1), axis=1)[:, 0]
    return (jax.nn.logsumexp(logits_tv, axis=1) - chosen_t).reshape(tokens_bs.shape)


def _add_dropout(model: GPT, drop: nnx.Dropout) -> None:
    """Puts `drop` behind the embedding and the layers' output maps."""

    def add_behind(owner: nnx.Module, name: str) -> None:
        setattr(owner, name, nnx.Sequential(getattr(owner, name), drop))

    add_behind(model, "embed")
    for block in model.layers:
        add_behind(block.attention, "out")
        add_behind(block.mlp, "down")
