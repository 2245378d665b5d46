"""The specification: every row against every position of its request, dense and obvious. For tests."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jorca.attention.abilities import Abilities
from jorca.attention.cache import KVCache
from jorca.attention.metadata import AttentionMetadata
from jorca.attention.rows import Rows, locate_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class PreparedReference:
    """What the reference needs to know about an iteration."""

    rows: Rows
    pages_bm: Int[Array, "B M"]


@dataclasses.dataclass(frozen=True, slots=True)
class ReferenceAttention:
    """Gathers all pages of each row's request, T * M * S positions in all, and masks."""

    abilities: ClassVar = Abilities()

    def prepare(self, metadata: AttentionMetadata, *, num_tokens: int, page_size: int) -> PreparedReference:
        """See `Attention.prepare`. Takes every page size."""
        return PreparedReference(locate_rows(metadata, num_tokens, page_size), metadata.pages_bm)

    def __call__(
        self,
        q_tnh: Float[Array, "T N H"],
        new_k_tnh: Float[Array, "T N_kv H"],
        new_v_tnh: Float[Array, "T N_kv H"],
        cache: KVCache,
        layer: int | Int[Array, ""],
        prepared: PreparedReference,
        *,
        scale: float,
    ) -> tuple[Float[Array, "T N H"], KVCache]:
        """See `Attention.__call__`."""
        rows = prepared.rows
        cache = cache.write(layer, rows.page_t, rows.slot_t, new_k_tnh, new_v_tnh)
        pages_tm = prepared.pages_bm[rows.request_t]
        group = cache.group_size(q_tnh.shape[1])

        def positions(pages_lpnsh: Array) -> Array:
            x_tmnsh = pages_lpnsh.at[layer, pages_tm].get(mode="clip")
            t, m, n, s, h = x_tmnsh.shape
            x_tcnh = x_tmnsh.swapaxes(2, 3).reshape(t, m * s, n, h).astype(jnp.float32)
            return x_tcnh if group == 1 else jnp.repeat(x_tcnh, group, axis=2)

        k_tcnh, v_tcnh = positions(cache.keys_lpnsh), positions(cache.values_lpnsh)
        at_c = jnp.arange(k_tcnh.shape[1])
        seen_tc = (at_c[None, :] <= rows.position_t[:, None]) & rows.live_t[:, None]
        scores_tnc = jnp.einsum("tnh,tcnh->tnc", q_tnh.astype(jnp.float32), k_tcnh, precision="highest")
        scores_tnc = jnp.where(seen_tc[:, None, :], scores_tnc * scale, -jnp.inf)
        weights_tnc = jnp.where(rows.live_t[:, None, None], jax.nn.softmax(scores_tnc, axis=-1), 0.0)
        # Unseen positions may hold NaN, and 0 * NaN is NaN.
        v_tcnh = jnp.where(seen_tc[:, :, None, None], v_tcnh, 0.0)
        o_tnh = jnp.einsum("tnc,tcnh->tnh", weights_tnc, v_tcnh, precision="highest")
        return o_tnh.astype(q_tnh.dtype), cache
