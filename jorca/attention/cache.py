"""The KV array: keys and values of every position of every request, allocated once."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values as two arrays [L, P, N, S, H]: a page of one head is contiguous.

    The arrays are donated to every step and come back aliased. Kernels take them whole, with a
    layer index; they are never sliced by layer into a temporary.
    """

    keys_lpnsh: Float[Array, "L P N S H"]
    values_lpnsh: Float[Array, "L P N S H"]

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        num_heads: int,
        page_size: int,
        head_dim: int,
        dtype: jnp.dtype,
    ) -> Self:
        """Returns a zeroed array pair on the default device."""
        shape = (num_layers, num_pages, num_heads, page_size, head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

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
