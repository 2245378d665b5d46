"""What the GPU kernels share: tiles of query rows, splits over the KV length, and what they take.

A tile is a few query rows of one request; a thread block attends with one tile and one head. The tiles of
an iteration stand in a table of static length, so that prompts and single tokens go through one grid, and
blocks beyond the last tile leave at once. Padding rows are a request without positions: its tiles store
zeros.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jorca.attention.abilities import Abilities
from jorca.attention.metadata import AttentionMetadata
from jorca.attention.rows import Rows, locate_rows
from jorca.attention.worklist import KVBlocks, WorkList

PAGE_SIZES: Final = (64, 128)
HEAD_DIMS: Final = (64, 80, 96, 128)
DTYPES: Final = ("float16", "bfloat16")
TILED: Final = Abilities(
    page_sizes=PAGE_SIZES, head_dims=HEAD_DIMS, dtypes=DTYPES, group_sizes=(1,), must_prove=True
)
"""What the kernels have in common; each adds where it runs."""

LOG2_E: Final = 1.4426950408889634
MASKED: Final = -1e30
"""Score of a position that is not seen. Finite: inf - inf would make a NaN of a row that sees nothing."""

_FULL_GPU: Final = 256
"""Thread blocks that keep a GPU busy: about two for each of the 108 or 132 processors of an A100 or H100."""
_SPLIT_POSITIONS: Final = 512
"""What a split walks over at least, if the page table is full."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class PreparedTiles:
    """The tiles of an iteration, W at most.

    Attributes:
      rows: Where each flat row stands.
      pages_bm: Page table.
      num_tiles: How many tiles there are, as an array of one.
      tiles_w4: Of each tile: its request's slot, first flat row, rows, and the position of the first row.
        Padding has the slot B, and its positions are negative.
      place_t: Where each flat row stands among the rows of all tiles.
    """

    rows: Rows
    pages_bm: Int[Array, "B M"]
    num_tiles: Int[Array, " 1"]
    tiles_w4: Int[Array, "W 4"]
    place_t: Int[Array, " T"]

    @classmethod
    def cut(
        cls, metadata: AttentionMetadata, *, num_tokens: int, page_size: int, block_q: int
    ) -> PreparedTiles:
        """Cuts the rows of all requests, and the padding rows, into tiles of at most `block_q` rows."""
        num_requests = metadata.pages_bm.shape[0] + 1
        work = WorkList.cut(
            _with_padding(metadata, num_tokens),
            jnp.ones(num_requests, bool),
            query_block=block_q,
            blocks=KVBlocks.of(page_size, page_size),
            max_items=min(num_tokens, num_tokens // block_q + num_requests),
        )
        row_wq = work.row_w[:, None] + jnp.arange(block_q, dtype=jnp.int32)[None, :]
        live_w = jnp.arange(work.row_w.size) < work.num_items
        mine_wq = live_w[:, None] & (jnp.arange(block_q)[None, :] < work.num_rows_w[:, None])
        place_wq = jnp.arange(row_wq.size, dtype=jnp.int32).reshape(row_wq.shape)
        place_t = jnp.zeros(num_tokens, jnp.int32)
        return cls(
            rows=locate_rows(metadata, num_tokens, page_size),
            pages_bm=metadata.pages_bm,
            num_tiles=work.num_items[None],
            tiles_w4=jnp.stack([work.request_w, work.row_w, work.num_rows_w, work.position_w], axis=1),
            place_t=place_t.at[jnp.where(mine_wq, row_wq, num_tokens)].set(place_wq, mode="drop"),
        )


def _with_padding(metadata: AttentionMetadata, num_tokens: int) -> AttentionMetadata:
    """Appends the padding rows as a request of no positions."""
    live = metadata.num_rows_b.sum(dtype=jnp.int32)

    def append(x_b: Array, x: Array) -> Array:
        return jnp.concatenate([x_b, x[None]])

    return dataclasses.replace(
        metadata,
        first_row_b=append(metadata.first_row_b, live),
        num_rows_b=append(metadata.num_rows_b, num_tokens - live),
        kv_len_b=append(metadata.kv_len_b, jnp.int32(0)),
    )


def choose_splits(num_tiles: int, num_heads: int, table_positions: int) -> int:
    """Returns how many thread blocks share the KV length of a tile.

    More than one only where the tiles of a bucket are too few to keep a GPU busy, and its requests may be
    long: a power of two, from static shapes alone.

    Args:
      num_tiles: Most tiles of the bucket, W.
      num_heads: Heads on this device.
      table_positions: Positions that a request can have, M * S.
    """
    most = min(_FULL_GPU // (num_tiles * num_heads), table_positions // _SPLIT_POSITIONS)
    return 1 << max(most, 1).bit_length() - 1


def split_range(num_steps: Array, split: Array | int, splits: int) -> tuple[Array, Array]:
    """Returns the first step of a split and the one behind its last; the range may be empty."""
    per_split = jax.lax.div(num_steps + (splits - 1), splits)
    first = jnp.minimum(split * per_split, num_steps)
    return first, jnp.minimum(first + per_split, num_steps)


def merge_splits(o_ztnh: Float[Array, "Z T N H"], log2_sum_ztn: Float[Array, "Z T N"]) -> Array:
    """Merges what the splits attended, each normalised by itself, by their weights in base 2."""
    weights_ztn = jnp.exp2(log2_sum_ztn - log2_sum_ztn.max(axis=0, keepdims=True))
    weights_ztn = weights_ztn / weights_ztn.sum(axis=0, keepdims=True)
    return (o_ztnh * weights_ztn[..., None]).sum(axis=0)
