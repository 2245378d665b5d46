"""What attention needs to know about an iteration: which rows are whose, and where their KV lies."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One entry per request slot of the batch, B of them; slots beyond the live requests are padding.

    Request b's query rows are the flat rows first_row_b[b] .. first_row_b[b] + num_rows_b[b] - 1, in
    order and without gaps between requests; they stand at the last num_rows_b[b] of its kv_len_b[b]
    positions (causal, aligned at the bottom right). Flat rows of no request are padding: they write
    nothing, and what attention returns for them is zero.

    Attributes:
      first_row_b: First flat row of each request; padding slots repeat the number of live rows.
      num_rows_b: Query rows of each request, 0 for padding.
      kv_len_b: KV length after this iteration, 0 for padding.
      pages_bm: Page table, M pages for each request; position p lives in page pages_bm[b, p // S], slot
        p % S. Entries past the last used page equal the number of pages and are never read.
    """

    first_row_b: Int[Array, " B"]
    num_rows_b: Int[Array, " B"]
    kv_len_b: Int[Array, " B"]
    pages_bm: Int[Array, "B M"]
