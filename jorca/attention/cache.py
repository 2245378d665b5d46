"""The KV array: keys and values of every position of every request, allocated once."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jaxtyping import Array, Float, Int

from jorca.config import KVSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values as two arrays [L, P, N_kv, S, H]: a page of one head is contiguous.

    The arrays are donated to every step and come back aliased. Kernels take them whole, with a
    layer index; they are never sliced by layer into a temporary.
    """

    keys_lpnsh: Float[Array, "L P N_kv S H"]
    values_lpnsh: Float[Array, "L P N_kv S H"]

    @classmethod
    def allocate(
        cls, spec: KVSpec, *, num_pages: int, page_size: int, sharding: Sharding | None = None
    ) -> Self:
        """Returns a zeroed array pair.

        Args:
          spec: Layers, heads, their width and dtype.
          num_pages: Pages, P, at least 1.
          page_size: Token positions in a page, S, at least 1.
          sharding: How the arrays lie on devices; None puts them on the default one.
        """
        shape, dtype = spec.shape(num_pages, page_size), jnp.dtype(spec.dtype)
        return cls(jnp.zeros(shape, dtype, device=sharding), jnp.zeros(shape, dtype, device=sharding))

    @property
    def num_pages(self) -> int:
        """Pages in all, P."""
        return self.keys_lpnsh.shape[1]

    @property
    def page_size(self) -> int:
        """Token positions in a page, S."""
        return self.keys_lpnsh.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values together."""
        return self.keys_lpnsh.nbytes + self.values_lpnsh.nbytes

    def group_size(self, num_heads: int) -> int:
        """Returns how many of so many query heads share each key/value head: head i reads i // group_size.

        Raises:
          ValueError: Query heads are no multiple of key/value heads.
        """
        num_kv_heads = self.keys_lpnsh.shape[2]
        if num_heads % num_kv_heads:
            raise ValueError(
                f"query heads must be a multiple of key/value heads {num_kv_heads}, got {num_heads}"
            )
        return num_heads // num_kv_heads

    def write(
        self,
        layer: int | Int[Array, ""],
        page_t: Int[Array, " T"],
        slot_t: Int[Array, " T"],
        k_tnh: Float[Array, "T N_kv H"],
        v_tnh: Float[Array, "T N_kv H"],
    ) -> Self:
        """Returns the cache with T keys and values of one layer written, in place where it is donated.

        Args:
          layer: From 0; it may be traced.
          page_t: The page of each; one of P or more writes nothing. Never negative.
          slot_t: The slot in that page. No two written rows share page and slot.
          k_tnh: Keys, cast to the cache's dtype.
          v_tnh: Values, cast alike.
        """

        def put(pages_lpnsh: Array, x_tnh: Array) -> Array:
            target = pages_lpnsh.at[layer, page_t, :, slot_t]
            return target.set(x_tnh.astype(pages_lpnsh.dtype), mode="drop")

        return dataclasses.replace(
            self, keys_lpnsh=put(self.keys_lpnsh, k_tnh), values_lpnsh=put(self.values_lpnsh, v_tnh)
        )
