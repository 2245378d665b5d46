"""`jorca doctor`: versions, devices, which attention runs and why, and whether it is right."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jorca.attention import AttentionMetadata, Implementation, KVCache, choose_attention, get_attention

_PACKAGES = ("jorca", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")
_BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
"""Largest difference from the reference, on outputs of size one: a few roundings of each dtype."""


def run_doctor(console: Console) -> bool:
    """Prints versions, devices, the choice of attention and its self-check.

    Returns:
      Whether the self-check passed.
    """
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("python", f"{platform.python_version()} on {platform.machine()}, {platform.system()}")
    for name in _PACKAGES:
        table.add_row(name, _version(name))
    for device in jax.devices():
        table.add_row(f"device {device.id}", _describe(device))
    choice, reason = choose_attention("auto", jax.devices()[0])
    table.add_row("attention", f"{choice}: {reason}")
    passed = True
    for dtype, case, error in check_attention(choice):
        ok = error <= _BOUNDS[dtype]
        passed &= ok
        verdict = "[green]ok[/green]" if ok else f"[red]more than {_BOUNDS[dtype]:g}[/red]"
        table.add_row(f"self-check {dtype}", f"{case}: off by {error:.1e}, {verdict}")
    console.print(table)
    return passed


def check_attention(name: Implementation) -> Iterator[tuple[str, str, float]]:
    """Runs an implementation beside the reference on small shapes.

    Yields:
      Dtype, what the case is, and the largest difference of outputs; infinite if one is not finite or
      the KV arrays differ.
    """
    ours, reference = _runner(name), _runner("reference")
    for dtype in _BOUNDS:
        for case, parts in _CASES.items():
            yield dtype, case, _difference(ours, reference, dtype, parts)


_CASES = {
    "a prompt and single tokens": ((5, 5), (1, 9), (1, 1)),
    "a piece of a long prompt": ((7, 70), (0, 0), (0, 0)),
    "single tokens, one of them late": ((1, 130), (1, 2), (1, 64)),
}
"""Pairs of (query rows, KV length). All are of one shape, which is compiled once."""

_PAGE_SIZE, _NUM_PAGES, _HEADS, _HEAD_DIM, _NUM_ROWS = 16, 27, 2, 32, 16


def _runner(implementation: Implementation) -> Callable[..., tuple[jax.Array, KVCache]]:
    attention = get_attention(implementation)

    @jax.jit
    def run(
        q: jax.Array, k: jax.Array, v: jax.Array, cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[jax.Array, KVCache]:
        prepared = attention.prepare(metadata, num_tokens=_NUM_ROWS, page_size=_PAGE_SIZE)
        return attention(q, k, v, cache, 0, prepared, scale=_HEAD_DIM**-0.5)

    return run


def _difference(
    ours: Callable[..., Any], reference: Callable[..., Any], dtype: str, parts: tuple[tuple[int, int], ...]
) -> float:
    rng = np.random.default_rng(0)
    rows = [rows for rows, _ in parts]
    metadata = AttentionMetadata(
        first_row_b=jnp.asarray(np.cumsum([0, *rows[:-1]]), jnp.int32),
        num_rows_b=jnp.asarray(rows, jnp.int32),
        kv_len_b=jnp.asarray([length for _, length in parts], jnp.int32),
        pages_bm=jnp.asarray(rng.permutation(_NUM_PAGES).reshape(len(parts), -1), jnp.int32),
    )
    shape = (1, _NUM_PAGES, _HEADS, _PAGE_SIZE, _HEAD_DIM)
    cache = KVCache(*(jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2)))
    rows_tnh = (jnp.asarray(rng.normal(size=(_NUM_ROWS, _HEADS, _HEAD_DIM)), dtype) for _ in range(3))
    q, k, v = rows_tnh
    (got, our_cache), (right, right_cache) = (run(q, k, v, cache, metadata) for run in (ours, reference))
    if not all(map(np.array_equal, jax.tree.leaves(our_cache), jax.tree.leaves(right_cache))):
        return float("inf")
    error = float(jnp.abs(got.astype(jnp.float32) - right.astype(jnp.float32)).max())
    return error if np.isfinite(error) else float("inf")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _describe(device: jax.Device) -> str:  # pyright: ignore[reportInvalidTypeForm]
    stats = device.memory_stats() or {}
    memory = f", {stats['bytes_limit'] / 2**30:.1f} GiB" if "bytes_limit" in stats else ""
    capability = getattr(device, "compute_capability", None)
    return f"{device.platform}, {device.device_kind}{f', compute {capability}' if capability else ''}{memory}"
