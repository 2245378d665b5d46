"""Attention in plain XLA for CPUs, and for any platform that has no kernel of its own.

The query rows of an iteration are cut into items, a few rows of one request each; every item walks
over its request's keys and values in steps of a block of positions, with the online softmax of
FlashAttention (Dao et al., 2022). Both loops have dynamic trip counts, so that the cost follows the
live tokens: not the bucket, not the length of the page table. An item's arithmetic is that of its
request alone and in a fixed order, so that its bits do not depend on its neighbours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jorca.attention.cache import KVCache
from jorca.attention.metadata import AttentionMetadata
from jorca.attention.rows import Rows, locate_rows


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class PreparedXla:
    """The work of an iteration: `decode` has the requests of one row, `prompt` blocks of all others."""

    rows: Rows
    pages_bm: Int[Array, "B M"]
    decode: WorkList
    prompt: WorkList


@dataclasses.dataclass(frozen=True, slots=True)
class _Blocks:
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


@dataclasses.dataclass(frozen=True, slots=True)
class XlaAttention:
    """The work-list walk.

    Attributes:
      query_block: Rows of a prompt that share one walk.
      kv_block: About how many positions a step reads.
    """

    query_block: int = 64
    kv_block: int = 64

    def prepare(self, metadata: AttentionMetadata, *, num_tokens: int, page_size: int) -> PreparedXla:
        """See `Attention.prepare`. Takes every page size."""
        blocks = _Blocks.of(page_size, self.kv_block)
        num_requests, table_size = metadata.pages_bm.shape
        single_b = metadata.num_rows_b == 1
        most = min(num_tokens // 2, num_tokens // self.query_block + num_requests)
        return PreparedXla(
            rows=locate_rows(metadata, num_tokens, page_size),
            # A step takes the pages of a whole block; what lies past a request's last one is masked.
            pages_bm=jnp.pad(metadata.pages_bm, ((0, 0), (0, -table_size % blocks.pages))),
            decode=_work_list(metadata, single_b, 1, blocks, min(num_tokens, num_requests)),
            prompt=_work_list(metadata, ~single_b, self.query_block, blocks, most),
        )

    def __call__(
        self,
        q_tnh: Float[Array, "T N H"],
        new_k_tnh: Float[Array, "T N H"],
        new_v_tnh: Float[Array, "T N H"],
        cache: KVCache,
        layer: int | Int[Array, ""],
        prepared: PreparedXla,
        *,
        scale: float,
    ) -> tuple[Float[Array, "T N H"], KVCache]:
        """See `Attention.__call__`."""
        rows = prepared.rows
        cache = cache.write(layer, rows.page_t, rows.slot_t, new_k_tnh, new_v_tnh)
        blocks = _Blocks.of(cache.page_size, self.kv_block)

        def attend(q_qnh: Array, work: WorkList, w: Array) -> Array:
            pages_m = prepared.pages_bm[work.request_w[w]]

            def read(step: Array) -> _Step:
                _, _, at_gs, new_gs = blocks.locate(step)
                k_gnsh = blocks.read(cache.keys_lpnsh, layer, pages_m, step)
                v_gnsh = blocks.read(cache.values_lpnsh, layer, pages_m, step)
                return _Step(at_gs, new_gs, k_gnsh, v_gnsh)

            q_qnh = q_qnh.astype(jnp.float32) * scale
            walk = _attend_row if q_qnh.shape[0] == 1 else _attend_rows
            return walk(q_qnh, work.position_w[w], work.num_rows_w[w], work.num_steps_w[w], read)

        # Room for a last block that reaches beyond the flat rows.
        padded_tnh = jnp.pad(q_tnh, ((0, self.query_block), (0, 0), (0, 0)))
        o_tnh = jnp.zeros_like(padded_tnh)
        for work, query_block in ((prepared.decode, 1), (prepared.prompt, self.query_block)):
            if work.request_w.size:
                o_tnh = _fill(o_tnh, padded_tnh, work, query_block, attend)
        return o_tnh[: q_tnh.shape[0]], cache


def _work_list(
    metadata: AttentionMetadata, chosen_b: Bool[Array, " B"], query_block: int, blocks: _Blocks, most: int
) -> WorkList:
    """Cuts the rows of the chosen requests into items, `most` of them at the most."""
    items_b = jnp.where(chosen_b, -(-metadata.num_rows_b // query_block), 0)
    ends_b = jnp.cumsum(items_b, dtype=jnp.int32)
    item_w = jnp.arange(most, dtype=jnp.int32)
    # The request of an item is the first whose items end behind it.
    request_w = (ends_b[None, :] <= item_w[:, None]).sum(axis=1, dtype=jnp.int32)
    request_w = jnp.minimum(request_w, items_b.size - 1)
    offset_w = (item_w - (ends_b - items_b)[request_w]) * query_block
    num_rows_w = jnp.minimum(metadata.num_rows_b[request_w] - offset_w, query_block)
    position_w = (metadata.kv_len_b - metadata.num_rows_b)[request_w] + offset_w
    return WorkList(
        num_items=ends_b[-1],
        request_w=request_w,
        row_w=metadata.first_row_b[request_w] + offset_w,
        num_rows_w=num_rows_w,
        position_w=position_w,
        num_steps_w=blocks.num_steps(position_w + num_rows_w),
    )


def _fill(
    o_tnh: Array,
    q_tnh: Array,
    work: WorkList,
    query_block: int,
    attend: Callable[[Array, WorkList, Array], Array],
) -> Array:
    """Returns `o_tnh` with the rows of all items filled in."""
    shape = (query_block, *q_tnh.shape[1:])

    def item(w: Array, o_tnh: Array) -> Array:
        start = (work.row_w[w], 0, 0)
        new_qnh = attend(jax.lax.dynamic_slice(q_tnh, start, shape), work, w).astype(o_tnh.dtype)
        if query_block > 1:  # Behind the item's rows are those of the next request.
            mine_q = jnp.arange(query_block) < work.num_rows_w[w]
            new_qnh = jnp.where(mine_q[:, None, None], new_qnh, jax.lax.dynamic_slice(o_tnh, start, shape))
        return jax.lax.dynamic_update_slice(o_tnh, new_qnh, start)

    return jax.lax.fori_loop(0, work.num_items, item, o_tnh)


class _Step(NamedTuple):
    """What a step reads: positions, whether they are new, keys and values."""

    at_gs: Int[Array, "G S"]
    new_gs: Bool[Array, "G S"]
    k_gnsh: Float[Array, "G N S H"]
    v_gnsh: Float[Array, "G N S H"]


def _attend_row(
    q_qnh: Float[Array, "1 N H"],
    position: Int[Array, ""],
    num_rows: Int[Array, ""],
    num_steps: Int[Array, ""],
    read: Callable[[Array], _Step],
) -> Float[Array, "1 N H"]:
    """Attends with one row.

    Both products are elementwise products summed by halving: XLA's CPU compiler makes one vectorised
    loop of each that reads the pages where they lie. For a batched matrix product it would copy them,
    and a sum over the last dimension or a strided one it does not vectorise.
    """
    _, num_heads, head_dim = q_qnh.shape
    q_nh = q_qnh[0]

    def body(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        max_n, sum_n, o_nh = carry
        at_gs, new_gs, k_gnsh, v_gnsh = read(step)
        seen_gs = new_gs & (at_gs <= position)
        products_gnsh = _halve(q_nh[None, :, None, :] * k_gnsh, 3, 16)
        num_sums = products_gnsh.shape[3]
        scores_gns = (products_gnsh.reshape(-1, num_sums) @ jnp.ones(num_sums)).reshape(k_gnsh.shape[:3])
        scores_gns = jnp.where(seen_gs[:, None, :], scores_gns, -jnp.inf)
        new_max_n = jnp.maximum(max_n, scores_gns.max(axis=(0, 2)))
        weights_gns = jnp.exp(scores_gns - new_max_n[None, :, None])
        decay_n = jnp.exp(max_n - new_max_n)
        # Unseen positions may hold NaN, and 0 * NaN is NaN.
        products_gnsh = jnp.where(seen_gs[:, None, :, None], weights_gns[:, :, :, None] * v_gnsh, 0.0)
        added_nh = _halve(_halve(products_gnsh, 2, 1), 0, 1)[0, :, 0]
        return new_max_n, sum_n * decay_n + weights_gns.sum(axis=(0, 2)), o_nh * decay_n[:, None] + added_nh

    init = (jnp.full(num_heads, -jnp.inf), jnp.zeros(num_heads), jnp.zeros((num_heads, head_dim)))
    _, sum_n, o_nh = jax.lax.fori_loop(0, num_steps, body, init)
    return (o_nh / sum_n[:, None])[None]


def _halve(x: Array, axis: int, at_most: int) -> Array:
    """Sums halves of an axis, one onto the other, until it is no longer than `at_most`."""
    while (size := x.shape[axis]) > at_most:
        low, high, odd = jnp.split(x, (size // 2, size // 2 * 2), axis=axis)
        x = low + high
        if size % 2:
            x = jnp.concatenate([x, odd], axis=axis)
    return x


def _attend_rows(
    q_qnh: Float[Array, "Q N H"],
    position: Int[Array, ""],
    num_rows: Int[Array, ""],
    num_steps: Int[Array, ""],
    read: Callable[[Array], _Step],
) -> Float[Array, "Q N H"]:
    """Attends with a block of rows; what it returns beyond `num_rows` has no meaning."""
    query_block, num_heads, head_dim = q_qnh.shape
    q_nqh = q_qnh.swapaxes(0, 1)
    end = position + num_rows
    last_q = jnp.minimum(position + jnp.arange(query_block), end - 1)

    def body(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        max_nq, sum_nq, o_nqh = carry
        at_gs, new_gs, k_gnsh, v_gnsh = read(step)
        at_c, new_c = at_gs.reshape(-1), new_gs.reshape(-1)
        k_nch = k_gnsh.swapaxes(0, 1).reshape(num_heads, -1, head_dim)
        v_nch = v_gnsh.swapaxes(0, 1).reshape(num_heads, -1, head_dim)
        v_nch = jnp.where((at_c < end)[None, :, None], v_nch, 0.0)
        seen_cq = new_c[:, None] & (at_c[:, None] <= last_q[None, :])
        # Rows last: maxima and sums over positions then run along whole vectors.
        scores_ncq = jnp.einsum("nch,nqh->ncq", k_nch, q_nqh, precision="highest")
        scores_ncq = jnp.where(seen_cq[None], scores_ncq, -jnp.inf)
        new_max_nq = jnp.maximum(max_nq, scores_ncq.max(axis=1))
        weights_ncq = jnp.exp(scores_ncq - new_max_nq[:, None, :])
        decay_nq = jnp.exp(max_nq - new_max_nq)
        added_nqh = jnp.einsum("ncq,nch->nqh", weights_ncq, v_nch, precision="highest")
        return (
            new_max_nq,
            sum_nq * decay_nq + weights_ncq.sum(axis=1),
            o_nqh * decay_nq[:, :, None] + added_nqh,
        )

    shape = (num_heads, query_block)
    init = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros_like(q_nqh))
    _, sum_nq, o_nqh = jax.lax.fori_loop(0, num_steps, body, init)
    return (o_nqh / sum_nq[:, :, None]).swapaxes(0, 1)
