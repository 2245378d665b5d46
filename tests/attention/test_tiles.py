import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.mutants import mutate
from attention.suite import NUM_HEADS, Request, check, make_batch
from jorca.attention.tiles import PreparedTiles, choose_splits, merge_splits, split_range

cut = jax.jit(PreparedTiles.cut, static_argnames=("num_tokens", "page_size", "block_q"))


def tiles_of(sizes, num_tokens: int, block_q: int) -> tuple[PreparedTiles, np.ndarray]:
    """Returns the tiles of requests of (rows, KV length), and those that exist as rows of numbers."""
    rng = np.random.default_rng(0)
    requests = [Request.random(rng, *s, head_dim=1) for s in sizes]
    batch = make_batch(requests, page_size=64, num_tokens=num_tokens, num_slots=len(sizes) + 1)
    tiles = cut(batch.metadata, num_tokens=num_tokens, page_size=64, block_q=block_q)
    return tiles, np.asarray(tiles.tiles_w4)[: int(tiles.num_tiles[0])]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    num_tokens=st.sampled_from([120, 150]),
    block_q=st.sampled_from([16, 64]),
)
def test_every_flat_row_is_in_one_tile_and_stands_where_its_request_says(rows, num_tokens, block_q):
    tiles, listed = tiles_of([(n, n + 7 if n else 0) for n in rows], num_tokens, block_q)
    owners = np.repeat([0, 1, 2, 4], [*rows, num_tokens - sum(rows)])  # slot 4 is padding's
    positions = np.concatenate([np.arange(n) + 7 for n in rows])
    found = []
    for w, (request, row, num_rows, position) in enumerate(listed):
        assert 1 <= num_rows <= block_q
        for offset in range(num_rows):
            at = row + offset
            found.append(at)
            assert owners[at] == request
            assert position + offset == positions[at] if request < 4 else position + offset < 0
            assert tiles.place_t[at] == w * block_q + offset
    assert found == list(range(num_tokens))


@pytest.mark.parametrize(
    ("tiles", "heads", "positions", "splits"),
    [
        (1, 16, 2048, 4),  # one request of GPT-3 1.3B: its longest makes four walks of 512
        (1, 8, 8192, 16),
        (1, 12, 8192, 16),
        (16, 16, 2048, 1),
        (9, 2, 1024, 2),
        (1, 1, 511, 1),
        (10_000, 96, 2048, 1),
    ],
)
def test_the_kv_length_is_split_where_tiles_are_few_and_requests_may_be_long(tiles, heads, positions, splits):
    assert choose_splits(tiles, heads, positions) == splits


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 7, 64])
def test_splits_follow_each_other_without_gaps(num_steps, splits):
    ranges = [map(int, split_range(jnp.int32(num_steps), split, splits)) for split in range(splits)]
    assert [step for first, last in ranges for step in range(first, last)] == list(range(num_steps))


def test_merged_splits_are_one_softmax():
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(3, 5)), rng.normal(size=(3, 5, 4))
    weights = np.exp2(scores - scores.max())
    right = np.einsum("zs,zsh->h", weights, values) / weights.sum()
    parts = np.exp2(scores) / np.exp2(scores).sum(axis=1, keepdims=True)
    o_zh = np.einsum("zs,zsh->zh", parts, values)
    merged = merge_splits(
        jnp.asarray(o_zh, jnp.float32)[:, None, None, :],
        jnp.log2(jnp.asarray(np.exp2(scores).sum(axis=1), jnp.float32))[:, None, None],
    )
    np.testing.assert_allclose(merged[0, 0], right, rtol=1e-6)


# (where a kernel reads a block, options that make its blocks 64 positions)
READERS = {
    "triton": ("            max_q, sum_q, o_parts = carry\n", {"block_kv": 64}),
    "mosaic": ("                slot = lax.rem(i - first, stages)\n                at = ", {}),
}


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("kernel", READERS)
def test_a_decode_step_reads_each_live_block_of_each_page_once(kernel, page_size, splits, capfd):
    """The kernel itself says what it reads, and only single tokens are in the batch."""
    place, options = READERS[kernel]
    indent = place[: len(place) - len(place.lstrip())]
    what = "pages_bm[request, lax.div(i, per_page)], lax.rem(i, per_page), head"
    says = f"{indent}pl.debug_print('read {{}} {{}} {{}}', {what})\n"
    says = place + says if kernel == "triton" else says + place
    talking = mutate(kernel, place, says, splits=splits, **options)
    rng = np.random.default_rng(0)
    lengths = [130, 64, 1, 200]
    requests = [Request.random(rng, 1, n, dtype=np.float16, head_dim=64) for n in lengths]
    batch = make_batch(requests, page_size=page_size, num_tokens=8, num_slots=5, table_positions=256)
    check(batch, talking, rtol=1e-3, atol=3e-3)
    jax.effects_barrier()
    printed = capfd.readouterr().out.splitlines()
    read = collections.Counter(line for line in printed if line.startswith("read"))
    live = [
        f"read {batch.metadata.pages_bm[b, start // page_size]} {start % page_size // 64} {head}"
        for b, length in enumerate(lengths)
        for start in range(0, length, 64)
        for head in range(NUM_HEADS)
    ]
    assert read == collections.Counter(live)
