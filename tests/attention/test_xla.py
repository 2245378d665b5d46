import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.suite import (
    NUM_HEADS,
    AttentionSuite,
    Request,
    make_batch,
    same_bits,
)
from jorca.attention import AttentionMetadata, KVCache, get_attention, selective_attention
from jorca.attention.xla import PreparedXla
from jorca.config import ConfigError, KVSpec


def num_steps(prepared: PreparedXla) -> int:
    return sum(int(w.num_steps_w[: int(w.num_items)].sum()) for w in (prepared.decode, prepared.prompt))


class TestXla(AttentionSuite):
    implementation = "xla"

    def test_it_agrees_with_the_reference(self):
        rng = np.random.default_rng(0)
        batch = make_batch([Request.random(rng, *s) for s in [(64, 129), (1, 129), (66, 66), (3, 90)]])
        o, _ = batch.run("xla")
        np.testing.assert_allclose(o, batch.run("reference")[0], rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
    @pytest.mark.parametrize("size", [(1, 129), (1, 3), (3, 70), (66, 129)])
    def test_a_request_has_the_same_bits_whoever_its_neighbours_are(self, size, dtype):
        rng = np.random.default_rng(1)
        mine = Request.random(rng, *size, dtype=dtype)

        def others(*sizes):
            return [Request.random(rng, *s, dtype=dtype) for s in sizes]

        neighbours = [
            [mine],
            [*others((1, 5)), mine],
            [None, mine, *others((66, 66), (1, 160))],
            [*others((50, 90), (2, 2), (1, 64)), mine],
            [*others((63, 64)), None, mine, *others((1, 1))],
        ]
        found = []
        for seed, requests in enumerate(neighbours):
            batch = make_batch(requests, seed=seed)
            at = next(b for b, r in enumerate(requests) if r is mine)
            found.append(batch.rows_of(batch.run("xla")[0], at))
        assert np.isfinite(found[0].astype(np.float32)).all()
        assert all(same_bits(x, found[0]) for x in found[1:])


class TestCost:
    """What a step walks over follows the live tokens, whatever the bucket."""

    def prepare(self, requests, **bucket) -> PreparedXla:
        rng = np.random.default_rng(0)
        batch = make_batch([Request.random(rng, *s) for s in requests], **bucket)
        prepare = jax.jit(get_attention("xla").prepare, static_argnames=("num_tokens", "page_size"))
        return prepare(batch.metadata, num_tokens=len(batch.q), page_size=batch.keys.shape[3])

    @pytest.mark.parametrize("bucket", [{}, {"num_tokens": 1024, "num_slots": 32, "table_positions": 2048}])
    @pytest.mark.parametrize(
        ("requests", "steps"),
        [
            ([], 0),
            ([(1, 1)], 1),
            ([(1, 64)], 1),
            ([(1, 65)], 2),
            ([(1, 65), (1, 128), (1, 129)], 2 + 2 + 3),
            ([(2, 130)], 3),
            ([(64, 64)], 1),
            ([(129, 129)], 1 + 2 + 3),  # causal: the first rows of a prompt do not walk over its end
        ],
    )
    def test_the_steps_are_those_of_the_live_tokens(self, requests, steps, bucket):
        for page_size in (1, 16, 64):
            assert num_steps(self.prepare(requests, page_size=page_size, **bucket)) == steps

    def test_large_pages_are_read_in_parts(self):
        assert num_steps(self.prepare([(1, 10), (1, 101), (1, 155)], page_size=100)) == 1 + 3 + 3


def step_of_layers(num_layers: int):
    """Returns a jitted step that runs several layers and donates the array."""

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(x, cache, metadata):
        for layer in range(num_layers):
            x, cache = selective_attention(x, x, x, cache, layer, metadata, scale=0.1)
        return x, cache

    return step


class TestInPlace:
    """The array is updated where it lies, in a step of several layers."""

    num_layers, num_tokens, num_pages = 2, 8, 512

    def metadata(self) -> AttentionMetadata:
        pages_bm = np.full((4, 8), self.num_pages, np.int32)
        pages_bm[0, :2], pages_bm[1, :3] = (7, 3), (0, 9, self.num_pages - 1)
        first, rows, lengths = (np.array(x, np.int32) for x in ([0, 1, 6, 6], [1, 5, 0, 0], [20, 37, 0, 0]))
        return AttentionMetadata(*map(jnp.array, (first, rows, lengths, pages_bm)))

    def cache(self) -> KVCache:
        spec = KVSpec(num_layers=self.num_layers, num_kv_heads=NUM_HEADS, head_dim=64, dtype="float32")
        return KVCache.allocate(spec, num_pages=self.num_pages, page_size=16)

    def test_the_compiled_step_aliases_the_whole_array_and_copies_none_of_it(self):
        cache = self.cache()
        x = jnp.ones((self.num_tokens, NUM_HEADS, 64))
        compiled = step_of_layers(self.num_layers).lower(x, cache, self.metadata()).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == cache.nbytes
        assert memory.temp_size_in_bytes < cache.nbytes / 16

    def test_the_buffers_stay_where_they_are_over_100_calls(self):
        step, cache, metadata = step_of_layers(self.num_layers), self.cache(), self.metadata()
        x = jnp.ones((self.num_tokens, NUM_HEADS, 64))

        def pointers(cache: KVCache) -> tuple[int, int]:
            return cache.keys_lpnsh.unsafe_buffer_pointer(), cache.values_lpnsh.unsafe_buffer_pointer()

        before = pointers(cache)
        for _ in range(100):
            _, cache = step(x, cache, metadata)
            jax.block_until_ready(cache)
            assert pointers(cache) == before


def test_an_unknown_implementation_is_refused_by_name():
    message = "attention must be one of reference, xla, mosaic, triton, got 'flash'"
    with pytest.raises(ConfigError, match=message):
        get_attention("flash")
