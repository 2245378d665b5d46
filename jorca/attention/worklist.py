"""What a walk over the KV array consists of: items of query rows, steps over blocks of positions."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jorca.attention.metadata import AttentionMetadata


@dataclasses.dataclass(frozen=True, slots=True)
class KVBlocks:
    """How positions are cut into the blocks that steps read: small pages together, large ones in parts.

    Attributes:
      page_size: Positions in a page, S.
      pages: Pages in a block, G.
      width: Positions that a block takes from each of its pages, W.
    """

    page_size: int
    pages: int
    width: int

    @classmethod
    def of(cls, page_size: int, kv_block: int) -> Self:
        """Returns blocks of `kv_block` positions, or of somewhat fewer."""
        return cls(page_size, max(1, kv_block // page_size), min(page_size, kv_block))

    @property
    def size(self) -> int:
        """Positions in a block."""
        return self.pages * self.width

    @property
    def span(self) -> int:
        """Positions in the pages that a block touches."""
        return self.pages * self.page_size

    @property
    def per_span(self) -> int:
        """Blocks in a span; more than 1 only for large pages, where the last one may overlap."""
        return -(-self.span // self.size)

    def num_steps(self, kv_len: Array) -> Array:
        """Returns how many blocks hold the first `kv_len` positions."""
        return kv_len // self.span * self.per_span - (-(kv_len % self.span) // self.size)

    def locate(self, step: Array) -> tuple[Array, Array, Int[Array, "G W"], Bool[Array, "G W"]]:
        """Returns a block's first page and slot, its positions, and which no earlier block has read."""
        span = step // self.per_span
        wanted = step % self.per_span * self.size
        slot = jnp.minimum(wanted, self.span - self.size)
        in_span_gw = jnp.arange(self.pages)[:, None] * self.page_size + jnp.arange(self.width)[None, :] + slot
        return span * self.pages, slot, span * self.span + in_span_gw, in_span_gw >= wanted

    def read(
        self, pages_lpnsh: Array, layer: int | Array, pages_m: Array, step: Array
    ) -> Float[Array, "G N W H"]:
        """Reads a block of the request whose pages are `pages_m`, cast to float32."""
        first_page, slot, _, _ = self.locate(step)
        pages_g = jax.lax.dynamic_slice(pages_m, (first_page,), (self.pages,))
        shape = (1, 1, pages_lpnsh.shape[2], self.width, pages_lpnsh.shape[4])

        def piece(page: Array) -> Array:
            return jax.lax.dynamic_slice(pages_lpnsh, (layer, page, 0, slot, 0), shape)[0, 0]

        return jax.vmap(piece)(pages_g).astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class WorkList:
    """Items of one size of query block: consecutive query rows of one request each.

    Attributes:
      num_items: Live items; what the arrays hold beyond them is never read.
      request_w: The request's slot in the batch.
      row_w: First flat row.
      num_rows_w: Rows.
      position_w: Position of the first row.
      num_steps_w: Blocks of positions that the item walks over.
    """

    num_items: Int[Array, ""]
    request_w: Int[Array, " W"]
    row_w: Int[Array, " W"]
    num_rows_w: Int[Array, " W"]
    position_w: Int[Array, " W"]
    num_steps_w: Int[Array, " W"]

    @classmethod
    def cut(
        cls,
        metadata: AttentionMetadata,
        chosen_b: Bool[Array, " B"],
        *,
        query_block: int,
        blocks: KVBlocks,
        max_items: int,
    ) -> Self:
        """Cuts the rows of the chosen requests into items of at most `query_block` rows."""
        items_b = jnp.where(chosen_b, -(-metadata.num_rows_b // query_block), 0)
        ends_b = jnp.cumsum(items_b, dtype=jnp.int32)
        item_w = jnp.arange(max_items, dtype=jnp.int32)
        # The request of an item is the first whose items end behind it.
        request_w = (ends_b[None, :] <= item_w[:, None]).sum(axis=1, dtype=jnp.int32)
        request_w = jnp.minimum(request_w, items_b.size - 1)
        offset_w = (item_w - (ends_b - items_b)[request_w]) * query_block
        num_rows_w = jnp.minimum(metadata.num_rows_b[request_w] - offset_w, query_block)
        position_w = (metadata.kv_len_b - metadata.num_rows_b)[request_w] + offset_w
        return cls(
            num_items=ends_b[-1],
            request_w=request_w,
            row_w=metadata.first_row_b[request_w] + offset_w,
            num_rows_w=num_rows_w,
            position_w=position_w,
            num_steps_w=blocks.num_steps(position_w + num_rows_w),
        )
