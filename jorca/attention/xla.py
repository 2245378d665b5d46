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
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jorca.attention.abilities import Abilities
from jorca.attention.cache import KVCache
from jorca.attention.metadata import AttentionMetadata
from jorca.attention.rows import Rows, locate_rows
from jorca.attention.worklist import KVBlocks, WorkList


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class PreparedXla:
    """The work of an iteration: `decode` has the requests of one row, `prompt` blocks of all others."""

    rows: Rows
    pages_bm: Int[Array, "B M"]
    decode: WorkList
    prompt: WorkList


@dataclasses.dataclass(frozen=True, slots=True)
class XlaAttention:
    """The work-list walk.

    Attributes:
      query_block: Rows of a prompt that share one walk; fewer in a smaller bucket.
      kv_block: About how many positions a step reads.
      one_walk: Whether a request that feeds one row takes the walk of a prompt, padded to a query block. It
        has a walk of its own otherwise, several times as fast, whose bits are not those of the same row
        inside a prompt.
    """

    abilities: ClassVar = Abilities(made_for=("cpu",), one_order={"query_block": 16, "one_walk": True})

    query_block: int = 64
    kv_block: int = 64
    one_walk: bool = False

    def prepare(self, metadata: AttentionMetadata, *, num_tokens: int, page_size: int) -> PreparedXla:
        """See `Attention.prepare`. Takes every page size."""
        blocks = KVBlocks.of(page_size, self.kv_block)
        num_requests, table_size = metadata.pages_bm.shape
        single_b = (metadata.num_rows_b == 1) & (not self.one_walk)
        query_block = self._query_block(num_tokens)
        return PreparedXla(
            rows=locate_rows(metadata, num_tokens, page_size),
            # A step takes the pages of a whole block; what lies past a request's last one is masked.
            pages_bm=jnp.pad(metadata.pages_bm, ((0, 0), (0, -table_size % blocks.pages))),
            decode=WorkList.cut(
                metadata, single_b, query_block=1, blocks=blocks, max_items=min(num_tokens, num_requests)
            ),
            prompt=WorkList.cut(
                metadata,
                ~single_b,
                query_block=query_block,
                blocks=blocks,
                max_items=min(
                    num_tokens if self.one_walk else num_tokens // 2, num_tokens // query_block + num_requests
                ),
            ),
        )

    def __call__(
        self,
        q_tnh: Float[Array, "T N H"],
        new_k_tnh: Float[Array, "T N_kv H"],
        new_v_tnh: Float[Array, "T N_kv H"],
        cache: KVCache,
        layer: int | Int[Array, ""],
        prepared: PreparedXla,
        *,
        scale: float,
    ) -> tuple[Float[Array, "T N H"], KVCache]:
        """See `Attention.__call__`."""
        rows = prepared.rows
        cache = cache.write(layer, rows.page_t, rows.slot_t, new_k_tnh, new_v_tnh)
        blocks = KVBlocks.of(cache.page_size, self.kv_block)
        group = cache.group_size(q_tnh.shape[1])

        def attend(q_qnh: Array, work: WorkList, w: Array) -> Array:
            pages_m = prepared.pages_bm[work.request_w[w]]

            def read(step: Array) -> _Step:
                _, _, at_gs, new_gs = blocks.locate(step)
                k_gnsh = blocks.read(cache.keys_lpnsh, layer, pages_m, step)
                v_gnsh = blocks.read(cache.values_lpnsh, layer, pages_m, step)
                return _Step(at_gs, new_gs, k_gnsh, v_gnsh)

            query_block = q_qnh.shape[0]
            # Rows beyond the item's see what its last row sees, and are thrown away.
            row_q = jnp.minimum(jnp.arange(query_block), work.num_rows_w[w] - 1)
            q_qnh = q_qnh.astype(jnp.float32) * scale
            position_q = work.position_w[w] + row_q
            if group > 1:
                q_qnh, position_q = _stack_groups(q_qnh, group), jnp.repeat(position_q, group)
            walk = _attend_row if len(q_qnh) == 1 else _attend_rows
            o_qnh = walk(q_qnh, position_q, work.num_steps_w[w], read)
            return o_qnh if group == 1 else _unstack_groups(o_qnh, group)

        num_tokens = q_tnh.shape[0]
        query_block = self._query_block(num_tokens)
        # Room for a last block that reaches beyond the flat rows.
        q_tnh = jnp.pad(q_tnh, ((0, query_block), (0, 0), (0, 0)))
        o_tnh = jnp.zeros_like(q_tnh)
        if not self.one_walk:
            o_tnh = _fill(o_tnh, q_tnh, prepared.decode, 1, attend)
        if self.one_walk or num_tokens > 1:
            o_tnh = _fill(o_tnh, q_tnh, prepared.prompt, query_block, attend)
        return o_tnh[:num_tokens], cache

    def _query_block(self, num_tokens: int) -> int:
        """Returns the rows of a query block, a multiple of 16.

        In smaller blocks the CPU's matrix product sums in another order, and the same row would get
        other bits in a small bucket than in a large one.
        """
        return min(self.query_block, -(-num_tokens // 16) * 16)


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


def _stack_groups(q_qnh: Array, group: int) -> Array:
    """Makes rows of the query heads that share a key/value head: [Q, N, H] to [Q * group, N_kv, H].

    They attend to the same keys and values, as rows at one position of one head do.
    """
    query_block, num_heads, head_dim = q_qnh.shape
    q_qngh = q_qnh.reshape(query_block, num_heads // group, group, head_dim)
    return q_qngh.swapaxes(1, 2).reshape(query_block * group, num_heads // group, head_dim)


def _unstack_groups(o_qnh: Array, group: int) -> Array:
    """Undoes `_stack_groups`."""
    num_rows, num_kv_heads, head_dim = o_qnh.shape
    o_qgnh = o_qnh.reshape(num_rows // group, group, num_kv_heads, head_dim)
    return o_qgnh.swapaxes(1, 2).reshape(num_rows // group, num_kv_heads * group, head_dim)


class _Step(NamedTuple):
    """What a step reads: positions, whether they are new, keys and values."""

    at_gs: Int[Array, "G S"]
    new_gs: Bool[Array, "G S"]
    k_gnsh: Float[Array, "G N S H"]
    v_gnsh: Float[Array, "G N S H"]


def _attend_row(
    q_qnh: Float[Array, "1 N H"],
    position_q: Int[Array, " 1"],
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
        seen_gs = new_gs & (at_gs <= position_q[0])
        products_gnsh = _halve(q_nh[None, :, None, :] * k_gnsh, 3, 16)
        num_sums = products_gnsh.shape[3]
        scores_gns = jnp.matmul(
            products_gnsh.reshape(-1, num_sums), jnp.ones(num_sums), precision="highest"
        ).reshape(k_gnsh.shape[:3])
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
    position_q: Int[Array, " Q"],
    num_steps: Int[Array, ""],
    read: Callable[[Array], _Step],
) -> Float[Array, "Q N H"]:
    """Attends with a block of rows at ascending positions."""
    query_block, num_heads, head_dim = q_qnh.shape
    q_nqh = q_qnh.swapaxes(0, 1)

    def body(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        max_nq, sum_nq, o_nqh = carry
        at_gs, new_gs, k_gnsh, v_gnsh = read(step)
        at_c, new_c = at_gs.reshape(-1), new_gs.reshape(-1)
        k_nch = k_gnsh.swapaxes(0, 1).reshape(num_heads, -1, head_dim)
        v_nch = v_gnsh.swapaxes(0, 1).reshape(num_heads, -1, head_dim)
        v_nch = jnp.where((at_c <= position_q[-1])[None, :, None], v_nch, 0.0)
        seen_qc = new_c[None, :] & (at_c[None, :] <= position_q[:, None])
        scores_nqc = jnp.einsum("nqh,nch->nqc", q_nqh, k_nch, precision="highest")
        scores_nqc = jnp.where(seen_qc[None], scores_nqc, -jnp.inf)
        new_max_nq = jnp.maximum(max_nq, scores_nqc.max(axis=2))
        weights_nqc = jnp.exp(scores_nqc - new_max_nq[:, :, None])
        decay_nq = jnp.exp(max_nq - new_max_nq)
        added_nqh = jnp.einsum("nqc,nch->nqh", weights_nqc, v_nch, precision="highest")
        return (
            new_max_nq,
            sum_nq * decay_nq + weights_nqc.sum(axis=2),
            o_nqh * decay_nq[:, :, None] + added_nqh,
        )

    shape = (num_heads, query_block)
    init = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros_like(q_nqh))
    _, sum_nq, o_nqh = jax.lax.fori_loop(0, num_steps, body, init)
    return (o_nqh / sum_nq[:, :, None]).swapaxes(0, 1)
