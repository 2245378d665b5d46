"""Whether an implementation of attention is right where it runs: small batches beside the reference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jorca.attention.api import Attention, get_attention, selective_attention
from jorca.attention.cache import KVCache
from jorca.attention.metadata import AttentionMetadata
from jorca.request import JorcaError

BOUNDS: Final = MappingProxyType({"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3})
"""Largest difference from the reference, on outputs of size one: a few roundings of each dtype."""

_NUM_KV_HEADS = 2


class AttentionCheckError(JorcaError):
    """An implementation of attention computes something else than the reference on this device."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Case:
    """A batch: what it is, flat rows, longest request, and (query rows, KV length) of each request."""

    name: str
    num_rows: int
    table_positions: int
    parts: tuple[tuple[int, int], ...]


# Kernels take larger tiles for many rows, and split the KV length for few rows and a long table.
_CASES: Final = (
    _Case("a prompt, a piece and a token", 96, 256, ((65, 65), (20, 150), (1, 9))),
    _Case("single tokens, one of them late", 16, 1024, ((1, 1000), (1, 2), (1, 64))),
    _Case("a piece of a long prompt", 16, 1024, ((7, 700), (0, 0), (0, 0))),
)


def check_attention(
    implementation: str | Attention,
    dtype: str,
    *,
    head_dim: int = 64,
    page_size: int = 64,
    group_size: int = 1,
) -> Iterator[tuple[str, float]]:
    """Runs an implementation beside the reference, on JAX's default device.

    Args:
      implementation: Its name, or the implementation itself.
      dtype: Of queries, keys and values, one of `BOUNDS`.
      head_dim: Head width, H.
      page_size: Positions in a page, S, at most 256.
      group_size: Query heads that share one key/value head.

    Yields:
      What the case is, and the largest difference of outputs; infinite if one is not finite or the KV
      arrays differ.
    """
    attention = get_attention(implementation) if isinstance(implementation, str) else implementation
    for case in _CASES:
        yield case.name, _difference(attention, dtype, head_dim, page_size, group_size, case)


def prove_attention(
    attention: Attention, dtype: str, *, head_dim: int = 64, page_size: int = 64, group_size: int = 1
) -> None:
    """Raises AttentionCheckError with the first case in which `check_attention` finds a difference.

    Args:
      attention: The implementation, with its options.
      dtype: As for `check_attention`, like the next three.
      head_dim: Head width, H.
      page_size: Positions in a page, S.
      group_size: Query heads that share one key/value head.
    """
    sizes = {"head_dim": head_dim, "page_size": page_size, "group_size": group_size}
    for case, error in check_attention(attention, dtype, **sizes):
        if not error <= BOUNDS[dtype]:
            name = type(attention).__name__
            raise AttentionCheckError(
                f"{name} is wrong on {jax.devices()[0].device_kind}: {case} in {dtype} is off by "
                f"{error:.1e}, more than {BOUNDS[dtype]:g}; use attention xla"
            )


@functools.partial(jax.jit, static_argnames="attention")
def _run(
    qkv: tuple[jax.Array, ...], cache: KVCache, metadata: AttentionMetadata, attention: Attention
) -> tuple[jax.Array, KVCache]:
    q, k, v = qkv
    scale = q.shape[-1] ** -0.5
    return selective_attention(q, k, v, cache, 0, metadata, scale=scale, implementation=attention)


def _difference(
    attention: Attention, dtype: str, head_dim: int, page_size: int, group_size: int, case: _Case
) -> float:
    rng = np.random.default_rng(0)
    rows = [rows for rows, _ in case.parts]
    num_pages = len(rows) * -(-case.table_positions // page_size)
    metadata = AttentionMetadata(
        first_row_b=jnp.asarray(np.cumsum([0, *rows[:-1]]), jnp.int32),
        num_rows_b=jnp.asarray(rows, jnp.int32),
        kv_len_b=jnp.asarray([length for _, length in case.parts], jnp.int32),
        pages_bm=jnp.asarray(rng.permutation(num_pages).reshape(len(rows), -1), jnp.int32),
    )

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    cache = KVCache(*(draw(1, num_pages, _NUM_KV_HEADS, page_size, head_dim) for _ in range(2)))
    heads = group_size * _NUM_KV_HEADS, _NUM_KV_HEADS, _NUM_KV_HEADS
    qkv = tuple(draw(case.num_rows, n, head_dim) for n in heads)
    got, our_cache = _run(qkv, cache, metadata, attention)
    right, right_cache = _run(qkv, cache, metadata, get_attention("reference"))
    if not all(map(np.array_equal, jax.tree.leaves(our_cache), jax.tree.leaves(right_cache))):
        return float("inf")
    error = float(jnp.abs(got.astype(jnp.float32) - right.astype(jnp.float32)).max())
    return error if np.isfinite(error) else float("inf")
