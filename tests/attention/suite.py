"""What every implementation of selective attention must do, and batches to show it with.

The right values are those of a softmax in float64 numpy, written per request and per row, on contiguous
keys and values: no pages, no padding, no blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jorca.attention import Attention, AttentionMetadata, KVCache, selective_attention

NUM_LAYERS, LAYER, NUM_HEADS, HEAD_DIM = 2, 1, 2, 16
SCALE = 0.3
KV_LENS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129)
LONG = 1024
SLOW = pytest.mark.slow


@functools.partial(jax.jit, static_argnames=("scale", "implementation"), donate_argnames="cache")
def attend(q, k, v, cache, layer, metadata, *, scale=SCALE, implementation):
    return selective_attention(q, k, v, cache, layer, metadata, scale=scale, implementation=implementation)


@dataclasses.dataclass(frozen=True)
class Request:
    """One request: queries [., N, H] of its last rows, keys and values [., N_kv, H] of all its positions."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.q)

    @property
    def kv_len(self) -> int:
        return len(self.k)

    @classmethod
    def random(
        cls,
        rng,
        num_rows,
        kv_len,
        dtype: Any = np.float32,
        num_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        group_size=1,
    ):
        """`num_heads` key/value heads, and `group_size` times as many query heads."""

        def draw(length, num_heads=num_heads):
            return rng.standard_normal((length, num_heads, head_dim)).astype(dtype)

        return cls(draw(num_rows, num_heads * group_size), draw(kv_len), draw(kv_len))

    def expected(self, scale: float = SCALE) -> np.ndarray:
        """Attention in float64: each row sees the positions up to its own."""
        q, k, v = (x.astype(np.float64) for x in (self.q, self.k, self.v))
        o = np.zeros_like(q)
        group_size = q.shape[1] // k.shape[1]
        for row in range(self.num_rows):
            seen = self.kv_len - self.num_rows + row + 1
            for head in range(q.shape[1]):
                shared = head // group_size
                scores = k[:seen, shared] @ q[row, head] * scale
                weights = np.exp(scores - scores.max())
                o[row, head] = weights @ v[:seen, shared] / weights.sum()
        return o


@dataclasses.dataclass(frozen=True)
class Batch:
    """Arguments of the op, and what must come back. Everything that is nobody's is NaN before."""

    requests: Sequence[Request]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    keys_after: np.ndarray
    values_after: np.ndarray
    metadata: AttentionMetadata
    first_rows: np.ndarray

    def run(
        self, implementation: str | Attention, layer=LAYER, scale: float = SCALE
    ) -> tuple[np.ndarray, KVCache]:
        cache = KVCache(jnp.array(self.keys), jnp.array(self.values))
        o, cache = attend(
            *map(jnp.array, (self.q, self.k, self.v)),
            cache,
            layer,
            self.metadata,
            scale=scale,
            implementation=implementation,
        )
        return np.asarray(o), cache

    def rows_of(self, o: np.ndarray, b: int) -> np.ndarray:
        first = self.first_rows[b]
        return o[first : first + self.requests[b].num_rows]


def make_batch(
    requests, *, page_size=16, num_tokens=136, num_slots=4, table_positions=160, seed=0, spare_pages=3
) -> Batch:
    """Lays requests out in a bucket, their pages shuffled. None in `requests` is a slot without rows."""
    rng = np.random.default_rng(seed)
    like = next((r for r in requests if r is not None), None) or Request.random(rng, 0, 0)
    empty = Request(like.q[:0], like.k[:0], like.v[:0])
    slots = [r or empty for r in requests] + [empty] * (num_slots - len(requests))
    table = -(-table_positions // page_size)
    num_pages = num_slots * table + spare_pages
    free = rng.permutation(num_pages)
    q, k, v = (np.full((num_tokens, *x.shape[1:]), np.nan, x.dtype) for x in (like.q, like.k, like.v))
    _, num_kv_heads, head_dim = like.k.shape
    shape = (NUM_LAYERS, num_pages, num_kv_heads, page_size, head_dim)
    keys, values, keys_after, values_after = (np.full(shape, np.nan, like.q.dtype) for _ in range(4))
    rows = np.array([r.num_rows for r in slots], np.int32)
    lengths = np.array([r.kv_len for r in slots], np.int32)
    first = np.cumsum(rows, dtype=np.int32) - rows
    pages = np.full((num_slots, table), num_pages, np.int32)
    for b, r in enumerate(slots):
        used = -(-r.kv_len // page_size)
        pages[b, :used], free = free[:used], free[used:]
        at = np.arange(r.kv_len)
        page, slot = pages[b, at // page_size], at % page_size
        past = r.kv_len - r.num_rows
        for array, after, x, new in ((keys, keys_after, r.k, k), (values, values_after, r.v, v)):
            array[LAYER, page[:past], :, slot[:past]] = x[:past]
            after[LAYER, page, :, slot] = x
            new[first[b] : first[b] + r.num_rows] = x[past:]
        q[first[b] : first[b] + r.num_rows] = r.q
    metadata = AttentionMetadata(*map(jnp.array, (first, rows, lengths, pages)))
    return Batch(slots, q, k, v, keys, values, keys_after, values_after, metadata, first)


def sizes_of(*kv_lens: int) -> list[tuple[int, int]]:
    """(query rows, KV length): of each length a single token, a piece of three and a whole prompt."""
    return [(rows, length) for length in kv_lens for rows in sorted({1, min(3, length), length})]


def same_bits(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def check(
    batch: Batch, implementation: str | Attention, rtol: float = 1e-5, atol: float = 1e-5
) -> np.ndarray:
    """Holds one run against the expected output and the expected array, and returns the output."""
    o, cache = batch.run(implementation)
    assert o.dtype == batch.q.dtype
    for b, request in enumerate(batch.requests):
        got = batch.rows_of(o, b).astype(np.float64)
        np.testing.assert_allclose(got, request.expected(), rtol=rtol, atol=atol)
    live = sum(r.num_rows for r in batch.requests)
    assert np.all(o[live:].astype(np.float32) == 0)
    assert same_bits(cache.keys_lpnsh, batch.keys_after)
    assert same_bits(cache.values_lpnsh, batch.values_after)
    return o


class AttentionSuite:
    """Inherited by one test class per implementation, which says what it takes.

    Attributes:
      implementation: What is tested.
      page_sizes: Page sizes that it takes; `page_size` is the one of tests that need no certain one.
      head_dim: Head width of tests that need no certain one.
      other_head_dims: Others that it takes.
      group_sizes: Query heads per key/value head that it takes.
      dtype: Of tests that need no certain one.
      rounds_weights: Whether it rounds softmax weights to the dtype before it multiplies values by them.
    """

    implementation: str | Attention
    page_sizes: tuple[Any, ...] = (1, pytest.param(2, marks=SLOW), pytest.param(16, marks=SLOW), 64, 100)
    page_size: int = 16
    head_dim: int = HEAD_DIM
    other_head_dims: tuple[int, ...] = (5, 20)
    group_sizes: tuple[int, ...] = (1, 2, 4, 8)
    dtype: Any = np.float32
    rounds_weights: bool = False

    def pytest_generate_tests(self, metafunc):
        arguments = {"page_size": "page_sizes", "head_dim": "other_head_dims", "group_size": "group_sizes"}
        for argument, attribute in arguments.items():
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, getattr(self, attribute))

    def request(self, rng, num_rows, kv_len, **shape) -> Request:
        shape = {"dtype": self.dtype, "head_dim": self.head_dim, **shape}
        return Request.random(rng, num_rows, kv_len, **shape)

    def batch(self, requests, **layout) -> Batch:
        return make_batch(requests, **{"page_size": self.page_size, **layout})

    def check(self, batch: Batch, implementation: str | Attention | None = None) -> np.ndarray:
        """Allows for float32's own error, and for the rounding that the dtype brings.

        The expected values are computed from the rounded inputs. Half an ulp is lost where the output is
        rounded; and where weights are rounded, each of them is off by as much, and their sum by as much of
        the largest value.
        """
        half_ulp = float(jnp.finfo(batch.q.dtype).eps) / 2
        if batch.q.dtype == np.float32:
            half_ulp = 1e-5
        largest = max((np.abs(r.v.astype(np.float64)).max() for r in batch.requests if r.kv_len), default=0.0)
        atol = 1e-5 + half_ulp * largest * self.rounds_weights
        return check(batch, implementation or self.implementation, rtol=half_ulp, atol=atol)

    def test_each_length_matches_a_softmax_over_that_request_alone(self, page_size):
        rng = np.random.default_rng(page_size)
        requests = [self.request(rng, *s) for s in sizes_of(*KV_LENS)]
        layout = {"num_tokens": 704, "num_slots": len(requests) + 2}
        self.check(self.batch(requests, page_size=page_size, **layout))

    def test_long_requests_match_a_softmax_over_each_alone(self):
        rng = np.random.default_rng(0)
        requests = [self.request(rng, *s, num_heads=1) for s in sizes_of(LONG)]
        self.check(self.batch(requests, num_tokens=LONG + 8, num_slots=3, table_positions=LONG))

    def test_prompts_pieces_and_single_tokens_share_a_batch(self, page_size):
        rng = np.random.default_rng(page_size)
        sizes = [(65, 65), (1, 129), (3, 128), (67, 100)]  # all 136 rows are live
        self.check(self.batch([self.request(rng, *s) for s in sizes], page_size=page_size))

    def test_slots_without_rows_contribute_nothing_wherever_they_stand(self):
        rng = np.random.default_rng(1)
        self.check(self.batch([None, self.request(rng, 1, 33), None, self.request(rng, 9, 9)]))

    def test_a_batch_without_requests_returns_zeros_and_leaves_the_array_alone(self):
        empty = self.request(np.random.default_rng(0), 0, 0)
        self.check(self.batch([empty]))

    def test_a_page_table_full_to_its_last_entry_is_read_to_its_end(self):
        rng = np.random.default_rng(2)
        full = {"table_positions": 192}
        self.check(self.batch([self.request(rng, 1, 192), self.request(rng, 5, 192)], **full))

    @pytest.mark.parametrize("num_rows", [1, 16])
    def test_padding_does_not_touch_a_last_slot_that_is_live(self, num_rows):
        # No spare pages and full tables: every slot of the array is somebody's, the last one too.
        rng = np.random.default_rng(3)
        requests = [self.request(rng, num_rows, 192) for _ in range(4)]
        batch = self.batch(requests, table_positions=192, spare_pages=0)
        assert np.isfinite(batch.keys_after[LAYER].astype(np.float32)).all()
        self.check(batch)

    def test_buckets_of_4_8_and_16_rows_agree(self):
        rng = np.random.default_rng(4)
        requests = [self.request(rng, 2, 17), self.request(rng, 1, 40)]
        four, eight, sixteen = (
            self.check(self.batch(requests, num_tokens=t))[:3].astype(np.float32) for t in (4, 8, 16)
        )
        np.testing.assert_allclose(eight, four, rtol=0, atol=1e-6)
        np.testing.assert_allclose(sixteen, four, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
    def test_half_precision_loses_only_its_roundings(self, dtype):
        rng = np.random.default_rng(5)
        sizes = [(65, 65), (1, 129), (3, 128)]
        self.check(self.batch([self.request(rng, *s, dtype=dtype) for s in sizes]))

    @pytest.mark.parametrize("num_rows", [1, 70])
    def test_float16_products_beyond_its_largest_number_stay_finite(self, num_rows):
        # 64 * 33 * 33 = 69,696 > 65,504. All scores are equal, so a row's output is the mean of what it sees.
        rng = np.random.default_rng(6)
        request = self.request(rng, num_rows, 70, dtype=np.float16, num_heads=1, head_dim=64)
        request.q[:], request.k[:] = 33.0, 33.0
        batch = self.batch([request])
        o, _ = batch.run(self.implementation, scale=1.0)
        means = np.cumsum(request.v.astype(np.float64), axis=0) / np.arange(1, 71)[:, None, None]
        np.testing.assert_allclose(batch.rows_of(o, 0).astype(np.float64), means[-num_rows:], atol=2e-3)

    def test_head_widths_need_not_be_powers_of_two(self, head_dim):
        rng = np.random.default_rng(7)
        sizes = [(1, 70), (9, 30)]
        requests = [self.request(rng, *s, num_heads=1, head_dim=head_dim) for s in sizes]
        self.check(self.batch(requests, num_tokens=16))

    @pytest.mark.parametrize("num_kv_heads", [1, 3])
    def test_query_heads_share_key_value_heads(self, group_size, num_kv_heads):
        rng = np.random.default_rng(11)
        shape = {"num_heads": num_kv_heads, "group_size": group_size}
        sizes = [(65, 65), (1, 129), (3, 128), (1, 1), (1, 64)]
        requests = [self.request(rng, *s, **shape) for s in sizes]
        self.check(self.batch([*requests, None], num_slots=7))

    def test_query_heads_that_no_key_value_head_is_for_are_refused(self):
        batch = self.batch([self.request(np.random.default_rng(12), 1, 1, num_heads=2)])
        uneven = dataclasses.replace(batch, q=np.repeat(batch.q, 2, axis=1)[:, :3])
        with pytest.raises(ValueError, match="multiple of key/value heads 2, got 3"):
            uneven.run(self.implementation)

    def test_a_static_layer_is_the_same_as_a_traced_one(self):
        rng = np.random.default_rng(8)
        batch = self.batch([self.request(rng, 1, 20), self.request(rng, 4, 20)], num_tokens=8)
        traced, _ = batch.run(self.implementation)
        static = jax.jit(
            lambda q, k, v, cache: selective_attention(
                q, k, v, cache, LAYER, batch.metadata, scale=SCALE, implementation=self.implementation
            )[0]
        )(
            *map(jnp.array, (batch.q, batch.k, batch.v)),
            KVCache(jnp.array(batch.keys), jnp.array(batch.values)),
        )
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (static, traced)), rtol=0, atol=1e-6)

    def test_the_same_inputs_give_the_same_bits(self):
        rng = np.random.default_rng(9)
        batch = self.batch([self.request(rng, *s) for s in [(65, 65), (1, 129), (3, 128)]])
        assert same_bits(batch.run(self.implementation)[0], batch.run(self.implementation)[0])

    def test_an_infinite_neighbour_changes_nobody_else(self):
        rng = np.random.default_rng(10)
        requests = [self.request(rng, *s) for s in [(3, 70), (1, 64), (5, 5)]]
        batch = self.batch(requests)
        clean, _ = batch.run(self.implementation)
        for b, bad in ((0, np.nan), (1, np.inf)):
            first, last = batch.first_rows[b], batch.first_rows[b] + requests[b].num_rows
            for x in (batch.q, batch.k, batch.v):
                x[first:last] = bad
        spoilt, _ = batch.run(self.implementation)
        assert same_bits(batch.rows_of(spoilt, 2), batch.rows_of(clean, 2))
