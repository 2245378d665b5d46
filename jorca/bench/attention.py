"""Time of a layer of attention on a GPU, against what its bytes and operations take at least."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jorca.attention import Attention, AttentionMetadata, KVCache
from jorca.bench.machine import machine_facts
from jorca.config import KVSpec

_NUM_HEADS, _HEAD_DIM, _PAGE_SIZE = 16, 128, 64
_NUM_LAYERS = 8  # taken in turns, so that a small batch does not stay in the cache
_CALLS = 16  # layers in a timed run

Requests = Sequence[tuple[int, int]]
"""(query rows, KV length) of each."""

SHAPES: Final[Mapping[str, tuple[int, Requests]]] = MappingProxyType(
    {
        "decode 64 x 1024": (64, [(1, 1024)] * 64),
        "decode 8 x 2048": (8, [(1, 2048)] * 8),
        "decode 1 x 2048": (1, [(1, 2048)]),
        "prompts 8 x 2048": (16384, [(2048, 2048)] * 8),
        "prompts 4 x 512": (2048, [(512, 512)] * 4),
        "prompt 512 + decode 32 x 1024": (1024, [(512, 512), *[(1, 1024)] * 32]),
    }
)
"""Name -> (bucket of tokens, requests)."""


def _kv_bytes(requests: Requests) -> int:
    """Bytes of the live keys and values of one layer."""
    return sum(2 * kv_len for _, kv_len in requests) * _NUM_HEADS * _HEAD_DIM * 2


def _num_flops(requests: Requests) -> float:
    """Operations of both products over the positions that each row sees."""
    seen = sum(rows * (kv_len - (rows - 1) / 2) for rows, kv_len in requests)
    return 4 * seen * _NUM_HEADS * _HEAD_DIM


def _median_s(run: Callable[[], Any], repeats: int) -> float:
    """Median time of a run, after one that warms up."""
    times_s = []
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        jax.block_until_ready(run())
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[1:])


def _copy_bytes_per_s(repeats: int) -> float:
    """Rate at which a kernel reads and writes memory, both counted."""
    x = jnp.zeros(2**29, jnp.float32)
    add = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / _median_s(lambda: add(x), repeats)


def _product_flops_per_s(repeats: int) -> float:
    """Rate of a product of two bfloat16 matrices of 8,192 x 8,192."""
    x = jnp.ones((8192, 8192), jnp.bfloat16)
    multiply = jax.jit(jnp.dot)
    return 2 * 8192**3 / _median_s(lambda: multiply(x, x), repeats)


def build_metadata(
    requests: Sequence[tuple[int, int]], num_slots: int, page_size: int, max_positions: int = 1024
) -> tuple[AttentionMetadata, int]:
    """Returns metadata with shuffled pages, and the number of pages."""
    table = -(-max_positions // page_size)
    num_pages = num_slots * table
    free = np.random.default_rng(0).permutation(num_pages)
    rows, lengths = np.zeros(num_slots, np.int32), np.zeros(num_slots, np.int32)
    pages = np.full((num_slots, table), num_pages, np.int32)
    for b, (num_rows, kv_len) in enumerate(requests):
        rows[b], lengths[b] = num_rows, kv_len
        used = -(-kv_len // page_size)
        pages[b, :used], free = free[:used], free[used:]
    first = np.cumsum(rows, dtype=np.int32) - rows
    return AttentionMetadata(*map(jnp.asarray, (first, rows, lengths, pages))), num_pages


def _time_layer_s(attention: Attention, num_tokens: int, requests: Requests, repeats: int) -> float:
    """Time of one layer's attention, the writing of new keys and values included."""
    longest = max(kv_len for _, kv_len in requests)
    metadata, num_pages = build_metadata(
        requests, min(num_tokens, max(64, len(requests))), _PAGE_SIZE, longest
    )

    def run(x_tnh: jax.Array, cache: KVCache, metadata: AttentionMetadata) -> tuple[jax.Array, KVCache]:
        prepared = attention.prepare(metadata, num_tokens=num_tokens, page_size=_PAGE_SIZE)

        def call(i: jax.Array, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
            x_tnh, cache = carry
            return attention(x_tnh, x_tnh, x_tnh, cache, i % _NUM_LAYERS, prepared, scale=_HEAD_DIM**-0.5)

        return jax.lax.fori_loop(0, _CALLS, call, (x_tnh, cache))

    spec = KVSpec(num_layers=_NUM_LAYERS, num_kv_heads=_NUM_HEADS, head_dim=_HEAD_DIM, dtype="bfloat16")
    cache = KVCache.allocate(spec, num_pages=num_pages, page_size=_PAGE_SIZE)
    x_tnh = jax.random.normal(jax.random.key(0), (num_tokens, _NUM_HEADS, _HEAD_DIM), jnp.bfloat16)
    compiled = jax.jit(run, donate_argnames="cache").lower(x_tnh, cache, metadata).compile()
    held = [cache]

    def once() -> jax.Array:
        o_tnh, held[0] = compiled(x_tnh, held[0], metadata)
        return o_tnh

    return _median_s(once, repeats) / _CALLS


def _time_cudnn_s(requests: Requests, repeats: int) -> float:
    """Time of cuDNN's attention on dense arrays, for requests that are all alike."""
    (rows, kv_len), num_requests = requests[0], len(requests)
    key = jax.random.key(0)
    q = jax.random.normal(key, (num_requests, rows, _NUM_HEADS, _HEAD_DIM), jnp.bfloat16)
    kv = jax.random.normal(key, (_NUM_LAYERS, num_requests, kv_len, _NUM_HEADS, _HEAD_DIM), jnp.bfloat16)

    @jax.jit
    def run(q: jax.Array, kv: jax.Array) -> jax.Array:
        def call(i: jax.Array, q: jax.Array) -> jax.Array:
            x = kv[i % _NUM_LAYERS]
            return jax.nn.dot_product_attention(q, x, x, is_causal=rows > 1, implementation="cudnn")

        return jax.lax.fori_loop(0, _CALLS, call, q)

    return _median_s(lambda: run(q, kv), repeats) / _CALLS


def measure_attention(implementations: Mapping[str, Attention], repeats: int) -> Iterator[dict[str, Any]]:
    """Times one layer of GPT-3 1.3B's attention, with pages of 64 positions in bfloat16.

    The floor is the larger of live bytes of keys and values over the rate of a copy, and live operations
    over the rate of a large product, both measured here. Beside the implementations stands, for batches
    whose requests are alike, JAX's attention by cuDNN on dense arrays.

    Args:
      implementations: By the names that the lines shall have.
      repeats: Timed runs of 16 layers each, of which the median counts.

    Yields:
      The machine and both rates; then a line for each shape and implementation, with the error if one
      does not run.
    """
    copy, product = _copy_bytes_per_s(repeats), _product_flops_per_s(repeats)
    yield machine_facts() | {"copy_gb_per_s": round(copy / 1e9), "product_tflop_per_s": round(product / 1e12)}
    for shape, (num_tokens, requests) in SHAPES.items():
        floor_s = max(_kv_bytes(requests) / copy, _num_flops(requests) / product)
        runs: dict[str, Callable[[], float]] = {
            name: lambda a=attention, t=num_tokens, r=requests: _time_layer_s(a, t, r, repeats)
            for name, attention in implementations.items()
        }
        if len(set(requests)) == 1:
            runs["cudnn, dense"] = lambda r=requests: _time_cudnn_s(r, repeats)
        for name, run in runs.items():
            line: dict[str, Any] = {
                "shape": shape,
                "implementation": name,
                "floor_us": round(floor_s * 1e6, 1),
            }
            try:
                time_s = run()
            except Exception as error:  # one that does not run must not hide the others
                yield line | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
                continue
            yield line | {
                "us": round(time_s * 1e6, 1),
                "of_floor": round(floor_s / time_s, 3),
                "kv_gb_per_s": round(_kv_bytes(requests) / time_s / 1e9),
                "tflop_per_s": round(_num_flops(requests) / time_s / 1e12, 1),
            }
