"""GPT-2 and GPT-3 in Flax NNX over flat tokens.

Every module works on `[T, ...]`: the tokens of all requests of an iteration lie end to end. Only
attention knows which rows belong together, and it comes in from outside as `Attend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jorca.config import ModelConfig
from jorca.model.params import ModelPart

Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, int, float], tuple[jax.Array, Any]]
"""(q_tnh, new_k_tnh, new_v_tnh, cache, layer, scale) -> (o_tnh, cache)."""

_GELU = {"gelu_tanh": True, "gelu_erf": False}


def _under(params: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Returns the entries below `prefix`, named from there."""
    return {name[len(prefix) + 1 :]: p for name, p in params.items() if name.startswith(f"{prefix}.")}


class LayerNorm(nnx.Module):
    """Normalises over the model width in float32, whatever the model's dtype."""

    def __init__(self, params: Mapping[str, Any], epsilon: float):
        self.scale = nnx.Param(params["scale"])
        self.bias = nnx.Param(params["bias"]) if "bias" in params else None
        self.epsilon = epsilon

    def __call__(self, x_td: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns the normalised rows, in the dtype of `x_td`."""
        x = x_td.astype(jnp.float32)
        mean = x.mean(axis=-1, keepdims=True)
        x = x - mean
        variance = jnp.square(x).mean(axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(variance + self.epsilon) * self.scale[...].astype(jnp.float32)[None]
        if self.bias is not None:
            x = x + self.bias[...].astype(jnp.float32)[None]
        return x.astype(x_td.dtype)


def _for_rows(product: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Multiplies rows with a matrix; a single row in half precision goes in twice.

    For one row XLA's CPU compiler casts the matrix to float32 anew in every step, ten times as slow.
    """
    if x.shape[0] > 1 or x.dtype == jnp.float32:
        return product(x)
    return product(jnp.repeat(x, 2, axis=0))[:1]


class Linear(nnx.Module):
    """A linear map of each row's last `num_axes` axes, with an optional bias."""

    def __init__(self, params: Mapping[str, Any], num_axes: int = 1):
        self.kernel = nnx.Param(params["kernel"])
        self.bias = nnx.Param(params["bias"]) if "bias" in params else None
        self.num_axes = num_axes

    def __call__(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """Applies it to every row."""
        # Not an einsum: over two axes it takes them in an order for which XLA copies the kernel.
        y = _for_rows(lambda x: jnp.tensordot(x, self.kernel[...], self.num_axes), x)
        return y if self.bias is None else y + self.bias[...][None]


class SelfAttention(nnx.Module):
    """Fused query, key and value projection, attention from outside, output projection."""

    def __init__(self, params: Mapping[str, Any], scale: float):
        self.qkv = Linear(_under(params, "qkv"))  # to [3, N, H]
        self.out = Linear(_under(params, "out"), num_axes=2)  # from [N, H]
        self.scale = scale

    def __call__(
        self,
        x_td: Float[Array, "T D"],
        positions_t: Int[Array, " T"],
        cache: Any,
        layer: int,
        attend: Attend,
    ) -> tuple[Float[Array, "T D"], Any]:
        """Returns what attention adds to the residual stream, and the cache with the new K and V.

        Positions are for models that rotate queries and keys by them; here the embedding has them already.
        """
        qkv_tcnh = self.qkv(x_td)
        with jax.named_scope("attend"):
            o_tnh, cache = attend(qkv_tcnh[:, 0], qkv_tcnh[:, 1], qkv_tcnh[:, 2], cache, layer, self.scale)
        return self.out(o_tnh), cache


class MLP(nnx.Module):
    """Two linear maps with a GELU between them, which is computed in float32."""

    def __init__(self, params: Mapping[str, Any], approximate: bool):
        self.up = Linear(_under(params, "up"))
        self.down = Linear(_under(params, "down"))
        self.approximate = approximate

    def __call__(self, x_td: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns what the feed-forward part adds to the residual stream."""
        up_tf = self.up(x_td)
        return self.down(jax.nn.gelu(up_tf.astype(jnp.float32), self.approximate).astype(up_tf.dtype))


class Block(nnx.Module):
    """One pre-LayerNorm transformer layer."""

    def __init__(self, config: ModelConfig, params: Mapping[str, Any], layer: int):
        self.attention_norm = LayerNorm(_under(params, "attention_norm"), config.norm_epsilon)
        self.attention = SelfAttention(_under(params, "attention"), config.attention_scale(layer))
        self.mlp_norm = LayerNorm(_under(params, "mlp_norm"), config.norm_epsilon)
        self.mlp = MLP(_under(params, "mlp"), _GELU[config.activation])

    def __call__(
        self,
        x_td: Float[Array, "T D"],
        positions_t: Int[Array, " T"],
        cache: Any,
        layer: int,
        attend: Attend,
    ) -> tuple[Float[Array, "T D"], Any]:
        """Returns the residual stream after this layer, and the cache."""
        with jax.named_scope("attention"):
            added_td, cache = self.attention(self.attention_norm(x_td), positions_t, cache, layer, attend)
            x_td = x_td + added_td
        with jax.named_scope("mlp"):
            return x_td + self.mlp(self.mlp_norm(x_td)), cache


class Embed(nnx.Module):
    """Token and position tables; the last stage of a pipeline has the tokens alone, for a tied head."""

    def __init__(self, params: Mapping[str, Any]):
        self.tokens = nnx.Param(params["tokens"])
        self.positions = nnx.Param(params["positions"]) if "positions" in params else None

    def __call__(self, token_ids_t: Int[Array, " T"], positions_t: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Returns the sum of both rows. Indices are in range: they are checked at submission."""
        assert self.positions is not None, "tokens come in at the first stage"
        return self.tokens[...][token_ids_t] + self.positions[...][positions_t]


class Head(nnx.Module):
    """The output table of a model whose head is not its token embedding."""

    def __init__(self, params: Mapping[str, Any]):
        self.kernel = nnx.Param(params["kernel"])


class GPT(nnx.Module):
    """A GPT whose modules hold the arrays of a flat dict (see `jorca.model.params.param_table`).

    Building it copies nothing, so that a compiled step takes the plain dict and builds the modules
    while it is traced. The paths of its `nnx.state` are the names of the table; a part's layers count from 0.

    Args:
      config: The model's shape and flags.
      params: An array, a tracer or a ShapeDtypeStruct for each name of `param_table(config, part)`.
      part: What of the model this is; None for all of it.
    """

    def __init__(self, config: ModelConfig, params: Mapping[str, Any], part: ModelPart | None = None):
        part = ModelPart(range(config.num_layers)) if part is None else part
        embed, head = _under(params, "embed"), _under(params, "head")
        self.embed = Embed(embed) if embed else None
        self.layers = nnx.List(Block(config, _under(params, f"layers.{i}"), i) for i in part.layers)
        self.final_norm = (
            LayerNorm(_under(params, "final_norm"), config.norm_epsilon) if part.has_head else None
        )
        self.head = Head(head) if head else None
        self.vocab_size = config.vocab_size

    def __call__(
        self,
        token_ids_t: Int[Array, " T"],
        positions_t: Int[Array, " T"],
        cache: Any,
        attend: Attend,
    ) -> tuple[Float[Array, "T D"], Any]:
        """Runs a whole model on a flat batch.

        Args:
          token_ids_t: Token ids, 0 <= id < V; padding rows may hold any id in range.
          positions_t: Position of each token in its own sequence, below `max_positions`.
          cache: The KV array, handed through to `attend`.
          attend: Attention, which also writes the new keys and values.

        Returns:
          The final norm's rows and the cache.
        """
        x_td, cache = self.run_layers(self.enter(token_ids_t, positions_t), positions_t, cache, attend)
        return self.leave(x_td), cache

    def enter(self, token_ids_t: Int[Array, " T"], positions_t: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Returns the embedded rows of a flat batch; for a part that has the embedding."""
        assert self.embed is not None, "tokens come in at the first stage"
        return self.embed(token_ids_t, positions_t)

    def run_layers(
        self, x_td: Float[Array, "T D"], positions_t: Int[Array, " T"], cache: Any, attend: Attend
    ) -> tuple[Float[Array, "T D"], Any]:
        """Runs the layers that are here; `attend` counts them from 0."""
        for layer, block in enumerate(self.layers):
            with jax.named_scope(f"layer_{layer}"):
                x_td, cache = block(x_td, positions_t, cache, layer, attend)
        return x_td, cache

    def leave(self, x_td: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Returns the final norm's rows; for a part that has the head."""
        assert self.final_norm is not None, "logits come out at the last stage"
        return self.final_norm(x_td)

    def logits(self, x_rd: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Returns float32 logits of the final norm's rows, without the columns of padding."""
        table = self.embed if self.head is None else self.head
        assert table is not None, "logits come out at the last stage"
        table_vd = table.tokens if isinstance(table, Embed) else table.kernel
        with jax.named_scope("head"):
            logits = _for_rows(
                lambda x: jnp.einsum("rd,vd->rv", x, table_vd[...], preferred_element_type=jnp.float32), x_rd
            )
            return logits[:, : self.vocab_size]
