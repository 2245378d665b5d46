"""Times one layer of attention on the CPU; prints a JSON line per shape and implementation.

GPT-2's shape: 12 heads of 64, pages of 64 positions by default. Times are the median of repeats.
The reference gathers every page of every row's table, so it is timed only where that fits.

    python benchmarks/attention_cpu.py --dtype float32 --page-size 64
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import jax
import numpy as np

from jorca.attention import AttentionMetadata, KVCache, get_attention
from jorca.bench.attention import build_metadata
from jorca.config import Dtype, KVSpec

NUM_HEADS, HEAD_DIM = 12, 64
REFERENCE_LIMIT_BYTES = 2**30


def decode_lengths(num_requests: int) -> list[tuple[int, int]]:
    """Returns (query rows, KV length) of requests whose lengths are spread evenly from 32 to 600."""
    return [(1, int(length)) for length in np.linspace(32, 600, num_requests)]


# Name -> (bucket of tokens, bucket of requests, requests).
SHAPES: dict[str, tuple[int, int, list[tuple[int, int]]]] = {
    "decode 1": (1, 1, [(1, 316)]),
    "decode 8": (8, 8, decode_lengths(8)),
    "decode 32": (32, 32, decode_lengths(32)),
    "decode 8 in a bucket of 32": (32, 32, decode_lengths(8)),
    "prompt 64": (64, 32, [(64, 64)]),
    "prompt 512": (512, 32, [(512, 512)]),
    "prompt 512 + decode 31": (1024, 32, [(512, 512), *decode_lengths(31)]),
}


def time_ms(name: str, shape: str, page_size: int, dtype: Dtype, repeats: int) -> float | None:
    """Returns the median time of one layer, or None where the implementation would need too much."""
    num_tokens, num_slots, requests = SHAPES[shape]
    metadata, num_pages = build_metadata(requests, num_slots, page_size)
    gathered = 2 * 4 * num_tokens * metadata.pages_bm.shape[1] * page_size * NUM_HEADS * HEAD_DIM
    if name == "reference" and gathered > REFERENCE_LIMIT_BYTES:
        return None
    attention = get_attention(name)

    def step(x_tnh: jax.Array, cache: KVCache, metadata: AttentionMetadata) -> tuple[jax.Array, KVCache]:
        prepared = attention.prepare(metadata, num_tokens=num_tokens, page_size=page_size)
        return attention(x_tnh, x_tnh, x_tnh, cache, 0, prepared, scale=HEAD_DIM**-0.5)

    spec = KVSpec(num_layers=1, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM, dtype=dtype)
    cache = KVCache.allocate(spec, num_pages=num_pages, page_size=page_size)
    x_tnh = jax.random.normal(jax.random.key(0), (num_tokens, NUM_HEADS, HEAD_DIM), dtype)
    compiled = jax.jit(step, donate_argnames="cache").lower(x_tnh, cache, metadata).compile()
    times_s = []
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        o_tnh, cache = compiled(x_tnh, cache, metadata)
        jax.block_until_ready((o_tnh, cache))
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[1:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--implementations", nargs="+", default=["xla", "reference"])
    options = parser.parse_args()
    for shape in SHAPES:
        for name in options.implementations:
            ms = time_ms(name, shape, options.page_size, options.dtype, options.repeats)
            if ms is not None:
                line = {"shape": shape, "implementation": name, "ms_per_layer": round(ms, 3)}
                print(json.dumps(line | {"dtype": options.dtype, "page_size": options.page_size}), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
