"""Where each flat row of an iteration stands: its request, its position, its place in the KV array."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jorca.attention.metadata import AttentionMetadata


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """One entry per flat row, T of them.

    Attributes:
      live_t: Whether the row belongs to a request; the rest is padding.
      request_t: Its request's slot in the batch, 0 for padding.
      position_t: Its position in its request, from 0; 0 for padding.
      page_t: The page that its key and value go to; padding has a page beyond any array, so that a
        scatter with mode="drop" writes nothing.
      slot_t: The slot in that page.
    """

    live_t: Bool[Array, " T"]
    request_t: Int[Array, " T"]
    position_t: Int[Array, " T"]
    page_t: Int[Array, " T"]
    slot_t: Int[Array, " T"]


def locate_rows(metadata: AttentionMetadata, num_tokens: int, page_size: int) -> Rows:
    """Returns where each of the `num_tokens` flat rows stands, for pages of `page_size` positions."""
    row_t = jnp.arange(num_tokens, dtype=jnp.int32)
    offset_tb = row_t[:, None] - metadata.first_row_b[None, :]
    owns_tb = (offset_tb >= 0) & (offset_tb < metadata.num_rows_b[None, :])
    live_t = owns_tb.any(axis=1)
    request_t = jnp.argmax(owns_tb, axis=1).astype(jnp.int32)
    start_b = metadata.kv_len_b - metadata.num_rows_b - metadata.first_row_b
    position_t = jnp.where(live_t, row_t + start_b[request_t], 0)
    page_t = metadata.pages_bm.at[request_t, position_t // page_size].get(mode="clip")
    # Beyond any array, and never negative: a negative index wraps around to the last page.
    page_t = jnp.where(live_t, page_t, jnp.iinfo(page_t.dtype).max)
    return Rows(live_t, request_t, position_t, page_t, position_t % page_size)
