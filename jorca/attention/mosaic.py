"""Attention as a Pallas kernel in Mosaic GPU, for Hopper.

The online softmax of FlashAttention (Dao et al., 2022) in base 2 and float32. One warpgroup attends with a
tile of 64 query rows; the copy engine (TMA) brings keys and values from where their pages lie into shared
memory, a block ahead of the matrix products (WGMMA), and stores the rows that are the tile's own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
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

_BLOCK_Q: Final = 64  # the rows of a WGMMA
_BLOCK_KV: Final = 64
_TMA_ALIGNMENT_BYTES: Final = 128  # of what TMA copies in shared memory (PTX ISA, cp.async.bulk.tensor)


@dataclasses.dataclass(frozen=True, slots=True)
class MosaicAttention:
    """One launch per layer, a thread block for each tile of 64 query rows and head.

    Attributes:
      splits: Thread blocks that share the KV length of a tile; None leaves it to `choose_splits`.
      stages: Blocks of keys and values in shared memory at a time, at least 2.
      weights_in_registers: Whether the softmax's weights go from registers into the second product rather
        than through shared memory. JAX cannot interpret it, hence no test runs it without a GPU.
      interpret: How the CPU interprets the kernel, for tests; None compiles it.
    """

    abilities: ClassVar = dataclasses.replace(
        TILED, compute_capability=(9, 9), made_for=(9,), one_order={"splits": 1}
    )

    splits: int | None = None
    stages: int = 2
    weights_in_registers: bool = False
    interpret: plgpu.InterpretGPUParams | None = None

    def prepare(self, metadata: AttentionMetadata, *, num_tokens: int, page_size: int) -> PreparedTiles:
        """See `Attention.prepare`."""
        refuse(self, page_size=page_size)
        return PreparedTiles.cut(metadata, num_tokens=num_tokens, page_size=page_size, block_q=_BLOCK_Q)

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
        num_tokens, num_heads, head_dim = q_tnh.shape
        num_tiles, table_positions = len(prepared.tiles_w4), prepared.pages_bm.shape[1] * cache.page_size
        splits = self.splits or choose_splits(num_tiles, num_heads, table_positions)
        dtype = q_tnh.dtype
        # Rows are stored in runs that begin at even ones; those of 80 half-precision values do not fit.
        aligned = 2 * head_dim * dtype.itemsize % _TMA_ALIGNMENT_BYTES == 0
        o_dtype = dtype if splits == 1 and aligned else jnp.float32
        outputs = [jax.ShapeDtypeStruct((splits, num_tokens, num_heads, head_dim), o_dtype)]
        tiled = _tiled(head_dim * dtype.itemsize, dtype)
        barriers = plgpu.Barrier(num_barriers=self.stages)
        scratch = {
            "k_barriers": barriers,
            "v_barriers": barriers,
            "q_qh": plgpu.SMEM((_BLOCK_Q, head_dim), dtype, transforms=tiled),
            "k_gsh": plgpu.SMEM((self.stages, _BLOCK_KV, head_dim), dtype, transforms=tiled),
            "v_gsh": plgpu.SMEM((self.stages, _BLOCK_KV, head_dim), dtype, transforms=tiled),
            "o_qh": plgpu.SMEM((_BLOCK_Q, head_dim), o_dtype),
        }
        if splits > 1:
            outputs.append(jax.ShapeDtypeStruct((splits, num_heads, num_tiles, _BLOCK_Q), jnp.float32))
            scratch["log2_sum_q"] = plgpu.SMEM((_BLOCK_Q,), jnp.float32)
        if not self.weights_in_registers:  # in one layout with the values that they are multiplied by
            scratch["weights_qs"] = plgpu.SMEM((_BLOCK_Q, _BLOCK_KV), dtype, transforms=tiled)
        o_ztnh, *log2_sum = plgpu.kernel(
            functools.partial(_kernel, scale=scale),
            out_type=outputs,
            scratch_types=scratch,
            grid=(splits, num_tiles, num_heads),  # the last one runs fastest
            grid_names=("split", "tile", "head"),
            compiler_params=plgpu.CompilerParams(
                approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
            ),
            interpret=self.interpret,
            kernel_name="selective_attention",
        )(
            layer,
            prepared.num_tiles,
            prepared.tiles_w4,
            prepared.pages_bm,
            # A tile reads 64 rows, whether they are its own or not.
            jnp.pad(q_tnh, ((0, _BLOCK_Q), (0, 0), (0, 0))),
            cache.keys_lpnsh,
            cache.values_lpnsh,
        )
        if splits == 1:
            return o_ztnh[0].astype(dtype)
        log2_sum_znt = log2_sum[0].reshape(splits, num_heads, -1)[:, :, prepared.place_t]
        return merge_splits(o_ztnh, log2_sum_znt.swapaxes(1, 2)).astype(dtype)


def _tiled(row_bytes: int, dtype: Any) -> tuple[Any, ...]:
    """Returns the layout of rows in shared memory for WGMMA: the widest swizzle that divides them."""
    swizzle = next(num_bytes for num_bytes in (128, 64, 32) if row_bytes % num_bytes == 0)
    tiling = (8, swizzle // jnp.dtype(dtype).itemsize)
    return plgpu.TilingTransform(tiling), plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def _kernel(
    layer_1: Any,
    num_tiles_1: Any,
    tiles_w4: Any,
    pages_bm: Any,
    q_tnh: Any,
    keys_lpnsh: Any,
    values_lpnsh: Any,
    o_ztnh: Any,
    *log2_sum_znwq: Any,
    scale: float,
    k_barriers: Any,
    v_barriers: Any,
    q_qh: Any,
    k_gsh: Any,
    v_gsh: Any,
    o_qh: Any,
    log2_sum_q: Any = None,
    weights_qs: Any = None,
) -> None:
    """Attends with one tile and one head.

    Arrays are whole and in global memory up to `log2_sum_znwq`, and shared memory from `q_qh` on.
    """
    head, split = lax.axis_index("head"), lax.axis_index("split")
    # Backwards: the last rows of a prompt see most, and the longest walks shall start first.
    tile = num_tiles_1[0] - 1 - lax.axis_index("tile")
    stages, head_dim = k_gsh.shape[0], k_gsh.shape[2]
    per_page = keys_lpnsh.shape[3] // _BLOCK_KV

    @pl.when(tile >= 0)
    def _() -> None:
        layer = layer_1[0]
        request, first_row, num_rows, position = (tiles_w4[tile, i] for i in range(4))
        kv_len = jnp.maximum(position + num_rows, 0)
        first, last = split_range(pl.cdiv(kv_len, _BLOCK_KV), split, o_ztnh.shape[0])

        def fetch(i: Array) -> None:
            """Starts the copies of a block of keys and values."""

            @pl.when(i < last)
            def _() -> None:
                slot = lax.rem(i - first, stages)
                at = pl.ds(lax.rem(i, per_page) * _BLOCK_KV, _BLOCK_KV)
                block = layer, pages_bm[request, lax.div(i, per_page)], head, at
                plgpu.copy_gmem_to_smem(keys_lpnsh.at[block], k_gsh.at[slot], k_barriers.at[slot])
                plgpu.copy_gmem_to_smem(values_lpnsh.at[block], v_gsh.at[slot], v_barriers.at[slot])

        for ahead in range(stages - 1):
            fetch(first + ahead)
        # Through registers: TMA cannot copy rows from any start into a swizzled layout.
        rows = q_tnh.at[pl.ds(first_row, _BLOCK_Q), head]
        q_qh[...] = plgpu.load(rows, layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.commit_smem()

        def step(i: Array, carry: tuple[Array, Array, Array], masked: bool) -> tuple[Array, Array, Array]:
            max_q, sum_q, o_acc = carry
            slot = lax.rem(i - first, stages)
            plgpu.barrier_wait(k_barriers.at[slot])
            scores_qs = _product(q_qh, k_gsh.at[slot].transpose((1, 0)), (_BLOCK_Q, _BLOCK_KV))
            # The products of the step before are done, and its slot is free.
            fetch(i + stages - 1)
            scores_qs = scores_qs * (scale * LOG2_E)
            if masked:
                row_qs, at_qs = (_iota((_BLOCK_Q, _BLOCK_KV), axis) for axis in (0, 1))
                scores_qs = jnp.where(at_qs - row_qs <= position - i * _BLOCK_KV, scores_qs, MASKED)
            new_max_q = jnp.maximum(max_q, scores_qs.max(axis=1))
            weights = jnp.exp2(scores_qs - lax.broadcast_in_dim(new_max_q, scores_qs.shape, [0]))
            decay_q = jnp.exp2(max_q - new_max_q)
            sum_q = sum_q * decay_q + weights.sum(axis=1)
            o_acc = o_acc * lax.broadcast_in_dim(decay_q, o_acc.shape, [0])
            plgpu.barrier_wait(v_barriers.at[slot])
            if masked:
                _clear_rows(v_gsh.at[slot], kv_len - i * _BLOCK_KV)
            weights = weights.astype(q_tnh.dtype)
            if weights_qs is None:
                plgpu.commit_smem()
                o_acc = _add_product(o_acc, weights, v_gsh.at[slot])
            else:
                weights_qs[...] = weights
                plgpu.commit_smem()
                o_acc = o_acc + _product(weights_qs, v_gsh.at[slot], o_acc.shape)
            return new_max_q, sum_q, o_acc

        # Blocks that every row sees in full need no mask.
        full = jnp.clip(lax.div(position + 1, _BLOCK_KV), first, last)
        carry = _filled((_BLOCK_Q,), MASKED), _filled((_BLOCK_Q,), 0.0), _filled((_BLOCK_Q, head_dim), 0.0)
        carry = lax.fori_loop(first, full, functools.partial(step, masked=False), carry)
        max_q, sum_q, o_acc = lax.fori_loop(full, last, functools.partial(step, masked=True), carry)

        sum_q = jnp.maximum(sum_q, 1e-30)  # a split may be empty
        o_qh[...] = (o_acc / lax.broadcast_in_dim(sum_q, o_acc.shape, [0])).astype(o_qh.dtype)
        if log2_sum_q is not None:
            log2_sum_q[...] = max_q + jnp.log(sum_q) * LOG2_E
        plgpu.commit_smem()
        if log2_sum_q is not None:
            plgpu.copy_smem_to_gmem(log2_sum_q, log2_sum_znwq[0].at[split, head, tile])
        _store_rows(o_qh, o_ztnh.at[split], first_row, num_rows, head)
        plgpu.wait_smem_to_gmem(0)


def _product(a: Any, b: Any, shape: Any) -> Array:
    """Multiplies matrices in shared memory, and waits for the result."""

    def multiply(accumulator: Any) -> Array:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _add_product(total: Array, a: Array, b: Any) -> Any:
    """Adds the product of a matrix in registers and one in shared memory, and waits for the result."""

    def multiply(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, a, b)

    return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(total))


def _iota(shape: tuple[int, int], axis: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def _filled(shape: tuple[int, ...], value: float) -> Array:
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _clear_rows(v_sh: Any, first: Array) -> None:
    """Puts zeros behind the last position: what lies there may be NaN, and 0 * NaN is NaN."""

    @pl.when(first < v_sh.shape[0])
    def _() -> None:
        v = plgpu.load(v_sh, layout=plgpu.Layout.WGMMA, optimized=False)
        v_sh[...] = jnp.where(_iota(v_sh.shape, 0) < first, v, jnp.zeros_like(v))


def _store_rows(o_qh: Any, o_tnh: Any, first_row: Array, num_rows: Array, head: Array) -> None:
    """Stores the tile's own rows: TMA copies boxes of static size, hence one for each bit of their number."""
    stored: Array | int = 0
    for size in (64, 32, 16, 8, 4, 2, 1):
        bit = num_rows & size

        @pl.when(bit != 0)
        def _(stored: Array | int = stored, size: int = size) -> None:
            rows = o_tnh.at[pl.ds(first_row + stored, size), head]
            plgpu.copy_smem_to_gmem(o_qh.at[pl.ds(stored, size)], rows)

        stored = stored + bit
