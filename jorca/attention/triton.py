"""Attention as a Pallas kernel in Triton, for A100 and newer GPUs.

The online softmax of FlashAttention (Dao et al., 2022) in base 2 and float32, over the pages where they
lie. JAX has deprecated its Triton backend (0.11.0) and will remove it; the kernel lives as long.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from jorca.attention.abilities import refuse
from jorca.attention.cache import KVCache
from jorca.attention.metadata import AttentionMetadata
from jorca.attention.tiles import (
    LOG2_E,
    MASKED,
    TILED,
    PreparedTiles,
    choose_splits,
    merge_splits,
    split_range,
)


@dataclasses.dataclass(frozen=True, slots=True)
class TritonAttention:
    """One launch per layer, a thread block for each tile of query rows and head.

    Attributes:
      block_q: Query rows of a tile, a power of two of at least 16; None takes 16 for buckets of up to 16
        rows for each request, and 64 otherwise.
      block_kv: Positions that a step reads, 16, 32 or 64.
      splits: Thread blocks that share the KV length of a tile; None leaves it to `choose_splits`.
      num_warps: Of 32 threads, in a thread block.
      num_stages: Loads that the compiler keeps in flight.
      interpret: Whether the kernel is interpreted on the CPU, for tests.
    """

    abilities: ClassVar = dataclasses.replace(
        TILED,
        compute_capability=(8, None),
        made_for=(8,),
        note="; JAX will remove its Triton backend",
        one_order={"block_q": 64, "splits": 1},
    )

    block_q: int | None = None
    block_kv: int = 32
    splits: int | None = None
    num_warps: int = 4
    num_stages: int = 2
    interpret: bool = False

    def prepare(self, metadata: AttentionMetadata, *, num_tokens: int, page_size: int) -> PreparedTiles:
        """See `Attention.prepare`."""
        refuse(self, page_size=page_size)
        block_q = self._block_q(num_tokens, metadata.num_rows_b.size)
        return PreparedTiles.cut(metadata, num_tokens=num_tokens, page_size=page_size, block_q=block_q)

    def __call__(
        self,
        q_tnh: Float[Array, "T N H"],
        new_k_tnh: Float[Array, "T N_kv H"],
        new_v_tnh: Float[Array, "T N_kv H"],
        cache: KVCache,
        layer: int | Int[Array, ""],
        prepared: PreparedTiles,
        *,
        scale: float,
    ) -> tuple[Float[Array, "T N H"], KVCache]:
        """See `Attention.__call__`."""
        _, num_heads, head_dim = q_tnh.shape
        refuse(self, head_dim=head_dim, dtype=q_tnh.dtype, group_size=cache.group_size(num_heads))
        rows = prepared.rows
        cache = cache.write(layer, rows.page_t, rows.slot_t, new_k_tnh, new_v_tnh)
        return self._attend(q_tnh, cache, jnp.asarray(layer, jnp.int32)[None], prepared, scale=scale), cache

    # Jitted, so that a step of many layers traces and lowers the kernel once.
    @functools.partial(jax.jit, static_argnames=("self", "scale"))
    def _attend(
        self, q_tnh: Array, cache: KVCache, layer: Array, prepared: PreparedTiles, *, scale: float
    ) -> Array:
        num_tokens, num_heads, _ = q_tnh.shape
        num_requests, table_size = prepared.pages_bm.shape
        num_tiles = prepared.tiles_w4.shape[0]
        block_q = self._block_q(num_tokens, num_requests)
        splits = self.splits or choose_splits(num_tiles, num_heads, table_size * cache.page_size)
        if self.interpret:  # It clamps a block that reaches beyond the flat rows, masked or not.
            q_tnh = jnp.pad(q_tnh, ((0, block_q), (0, 0), (0, 0)))
        operands = (layer, prepared.num_tiles, prepared.tiles_w4, prepared.pages_bm, q_tnh)
        operands = (*operands, cache.keys_lpnsh, cache.values_lpnsh)
        outputs = [jax.ShapeDtypeStruct(q_tnh.shape, q_tnh.dtype)]
        if splits > 1:
            parts = jax.ShapeDtypeStruct((splits, *q_tnh.shape), jnp.float32)
            outputs = [parts, jax.ShapeDtypeStruct(parts.shape[:-1], jnp.float32)]
        o, *log2_sum = pl.pallas_call(
            functools.partial(
                _kernel,
                block_q=block_q,
                block_kv=self.block_kv,
                splits=splits,
                scale=scale,
            ),
            out_shape=outputs,
            grid=(num_heads, num_tiles, splits),  # the first one runs fastest
            in_specs=[_whole(x) for x in operands],
            out_specs=[_whole(x) for x in outputs],
            compiler_params=plt.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages),
            interpret=self.interpret,
            name="selective_attention",
        )(*operands)
        if splits > 1:
            o = merge_splits(o, *log2_sum).astype(q_tnh.dtype)
        return o[:num_tokens]

    def _block_q(self, num_tokens: int, num_requests: int) -> int:
        return self.block_q or (16 if num_tokens <= 16 * num_requests else 64)


def _whole(x: Any) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))


def _powers(head_dim: int) -> list[tuple[int, int]]:
    """Returns (start, width) of the parts that a head is read in: Triton's blocks are powers of two."""
    widths = [1 << bit for bit in range(head_dim.bit_length()) if head_dim >> bit & 1][::-1]
    return [(sum(widths[:i]), width) for i, width in enumerate(widths)]


def _kernel(
    layer_1: Any,
    num_tiles_1: Any,
    tiles_w4: Any,
    pages_bm: Any,
    q_tnh: Any,
    keys_lpnsh: Any,
    values_lpnsh: Any,
    o: Any,
    *log2_sum: Any,
    block_q: int,
    block_kv: int,
    splits: int,
    scale: float,
) -> None:
    """Attends with one tile and one head. All arrays are whole and in global memory."""
    head, split = pl.program_id(0), pl.program_id(2)
    # Backwards: the last rows of a prompt see most, and the longest walks shall start first.
    tile = num_tiles_1[0] - 1 - pl.program_id(1)
    per_page = keys_lpnsh.shape[3] // block_kv
    parts = _powers(q_tnh.shape[2])

    @pl.when(tile >= 0)
    def _() -> None:
        layer = layer_1[0]
        request, first_row, num_rows, position = (tiles_w4[tile, i] for i in range(4))
        kv_len = jnp.maximum(position + num_rows, 0)
        row_q = jnp.arange(block_q, dtype=jnp.int32)
        mine_q1 = (row_q < num_rows)[:, None]
        place = pl.ds(first_row, block_q), head
        q_parts = [plt.load(q_tnh.at[*place, pl.ds(*part)], mask=mine_q1, other=0.0) for part in parts]

        def step(i: Array, carry: tuple[Any, ...], masked: bool) -> tuple[Any, ...]:
            max_q, sum_q, o_parts = carry
            block = layer, pages_bm[request, lax.div(i, per_page)], head
            block = *block, pl.ds(lax.rem(i, per_page) * block_kv, block_kv)
            scores_qs = functools.reduce(
                jnp.add,
                (
                    plt.dot(q, keys_lpnsh[*block, pl.ds(*part)].T)
                    for q, part in zip(q_parts, parts, strict=True)
                ),
            )
            scores_qs = scores_qs * (scale * LOG2_E)
            at_s = i * block_kv + jnp.arange(block_kv, dtype=jnp.int32)
            if masked:
                scores_qs = jnp.where(at_s[None, :] <= (position + row_q)[:, None], scores_qs, MASKED)
            new_max_q = jnp.maximum(max_q, scores_qs.max(axis=1))
            weights_qs = jnp.exp2(scores_qs - new_max_q[:, None])
            decay_q = jnp.exp2(max_q - new_max_q)

            def add(o_qh: Array, part: tuple[int, int]) -> Array:
                v_sh = values_lpnsh.at[*block, pl.ds(*part)]
                # What lies behind the last position may be NaN, and 0 * NaN is NaN.
                v_sh = plt.load(v_sh, mask=(at_s < kv_len)[:, None], other=0.0) if masked else v_sh[...]
                return o_qh * decay_q[:, None] + plt.dot(weights_qs.astype(v_sh.dtype), v_sh)

            sum_q = sum_q * decay_q + weights_qs.sum(axis=1)
            return new_max_q, sum_q, tuple(map(add, o_parts, parts))

        first, last = split_range(pl.cdiv(kv_len, block_kv), split, splits)
        # Blocks that every row sees in full need no mask.
        full = jnp.clip(lax.div(position + 1, block_kv), first, last)
        carry = (
            jnp.full(block_q, MASKED, jnp.float32),
            jnp.zeros(block_q, jnp.float32),
            tuple(jnp.zeros((block_q, width), jnp.float32) for _, width in parts),
        )
        carry = lax.fori_loop(first, full, functools.partial(step, masked=False), carry)
        carry = lax.fori_loop(full, last, functools.partial(step, masked=True), carry)
        max_q, sum_q, o_parts = carry
        sum_q = jnp.maximum(sum_q, 1e-30)  # a split may be empty
        whole = (split, *place) if splits > 1 else place
        for o_qh, part in zip(o_parts, parts, strict=True):
            plt.store(o.at[*whole, pl.ds(*part)], (o_qh / sum_q[:, None]).astype(o.dtype), mask=mine_q1)
        for log2_sum_ztn in log2_sum:
            plt.store(log2_sum_ztn.at[*whole], max_q + jnp.log2(sum_q), mask=row_q < num_rows)
