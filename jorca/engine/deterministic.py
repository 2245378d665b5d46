"""Proof at start-up that a request's bits depend on nothing but the request: `deterministic=True`.

Inside one program a row of a matrix product has the same bits whatever the other rows are and wherever it
stands. Programs of other sizes may sum in another order: bits agree in groups of sizes, which depend on the
machine, the widths and the dtype. A deterministic engine keeps to one group, and a probe proves it: it feeds
one sequence through every compiled program, whole, in pieces and token by token, among strangers and at
different places, and compares the keys and values of all layers and all that the step returns, logits
included.

Keys and values witness everything below the last layer's attention, at every position; logits witness the
rest. The order in which a program sums does not depend on the numbers, so that one sequence stands for all.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import jax
import numpy as np

from jorca.attention import KVCache
from jorca.config import ConfigError, ModelConfig
from jorca.engine.buckets import Bucket, BucketLadder
from jorca.engine.executor import LocalExecutor
from jorca.engine.packing import BucketPacker
from jorca.engine.programs import progress_bar
from jorca.engine.records import make_record
from jorca.request import Request, SamplingParams
from jorca.scheduler import Item, Iteration

_MAX_LENGTH: Final = 80  # more than a query block and a block of keys, which have 64 positions
_MAX_LANES: Final = 6
_MAX_LOGITS: Final = 8  # rows of logits that one item asks for
_MAX_ROUNDS: Final = 8  # of pieces that are fed again, in the smallest buckets
_ROUND_ROWS: Final = 512  # about so many rows these rounds cost in a bucket; there is one round at least


class _Piece(NamedTuple):
    """A part of the sequence, fed in a lane."""

    lane: int
    start: int
    end: int


class _Observations:
    """Which buckets gave which bits for the same thing."""

    def __init__(self):
        self._seen: dict[object, dict[bytes, set[int]]] = collections.defaultdict(
            lambda: collections.defaultdict(set)
        )

    def add(self, thing: object, bits: bytes, bucket: Bucket) -> None:
        self._seen[thing][hashlib.sha256(bits).digest()].add(bucket.num_tokens)

    def agree_from(self, smallest: int) -> bool:
        """Returns whether all buckets of at least that size gave the same bits for everything."""
        return all(
            sum(max(buckets) >= smallest for buckets in by_bits.values()) <= 1
            for by_bits in self._seen.values()
        )


def prove_bits(
    executor: LocalExecutor, ladder: BucketLadder, model: ModelConfig, *, show_progress: bool = False
) -> None:
    """Runs the probe in every bucket.

    Args:
      executor: Its programs return logits. Its KV array is written to: reset it afterwards.
      ladder: The buckets.
      model: The model.
      show_progress: Whether to draw a progress bar on standard error.

    Raises:
      ConfigError: A request's bits would depend on the batch; the message names the buckets and the remedy.
    """
    probe = _Probe(executor, ladder, model)
    with progress_bar(show_progress) as progress:
        for bucket in progress.track(ladder.buckets, description="proving bits"):
            probe.observe(bucket)
    sizes = [bucket.num_tokens for bucket in ladder.buckets]
    if probe.seen.agree_from(sizes[0]):
        return
    good = next((size for size in sizes if probe.seen.agree_from(size)), None)
    if good is None:
        raise ConfigError(
            "deterministic must be False for this model on this device: in the bucket of "
            f"{sizes[-1]} tokens a request's bits depend on its neighbours or on how it is fed; "
            "try another attention or dtype"
        )
    bad = [size for size in sizes if size < good]
    raise ConfigError(
        f"deterministic needs buckets that give a request the same bits, but those of {bad} tokens do not "
        f"agree with those of {[size for size in sizes if size >= good]}; set min_bucket={good}"
    )


class _Probe:
    """Feeds one sequence, again and again, in lanes: sets of pages that hold a copy of it each."""

    def __init__(self, executor: LocalExecutor, ladder: BucketLadder, model: ModelConfig):
        cache = executor.stages[0].cache
        self._executor = executor
        self._ladder = ladder
        self._model = model
        self._page_size, self._num_pages = cache.page_size, cache.num_pages
        length = min(_MAX_LENGTH, model.max_positions, self._num_pages * self._page_size)
        self._tokens = tuple(np.random.default_rng(0).integers(model.vocab_size, size=length).tolist())
        pages = -(-length // self._page_size)
        self._lanes = [
            tuple(range(lane * pages, (lane + 1) * pages))
            for lane in range(min(_MAX_LANES, self._num_pages // pages))
        ]
        self._spare = range(len(self._lanes) * pages, self._num_pages)
        drawn = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=1, logprobs=0)
        greedy = SamplingParams(temperature=0, seed=0)
        self._records = {
            name: make_record(
                Request(id=name, prompt_ids=(0,), params=params),
                stop_ids=frozenset(),
                vocab_size=model.vocab_size,
            )
            for name, params in (("mine", drawn), ("other", greedy))
        }
        self.seen = _Observations()

    def observe(self, bucket: Bucket) -> None:
        """Fills every lane anew and feeds pieces again, all in one bucket, and notes the bits."""
        packer = BucketPacker(self._ladder.only(bucket), self._num_pages)
        rng = np.random.default_rng(1)  # the same pieces in every bucket
        for number in range(1 + max(1, min(_MAX_ROUNDS, _ROUND_ROWS // bucket.num_tokens))):
            for pieces in self._iterations(bucket, self._round(number, rng)):
                self._run(packer, bucket, pieces, rng)
            for pages in self._lanes:
                self.seen.add("keys and values", self._bits_of(pages), bucket)

    def _round(self, number: int, rng: np.random.Generator) -> list[_Piece]:
        """Returns what each lane feeds: first the whole sequence, later a single token or a few."""
        length = len(self._tokens)
        if number == 0:
            return [_Piece(lane, 0, length) for lane in range(len(self._lanes))]
        pieces = []
        for lane in range(len(self._lanes)):
            start = int(rng.integers(length))
            most = 1 if (lane + number) % 2 else length - start
            pieces.append(_Piece(lane, start, start + int(rng.integers(most)) + 1))
        return pieces

    def _iterations(self, bucket: Bucket, pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
        """Cuts a round into iterations that the bucket holds, each lane at most once in each."""
        left = collections.deque(pieces)
        while left:
            rows, chosen = bucket.num_tokens, []
            for _ in range(min(len(left), bucket.num_rows)):
                piece = left.popleft()
                end = min(piece.end, piece.start + rows)
                if end > piece.start:
                    chosen.append(piece._replace(end=end))
                if end < piece.end:
                    left.append(piece._replace(start=end))
                rows -= end - piece.start
            yield chosen

    def _run(
        self, packer: BucketPacker, bucket: Bucket, pieces: list[_Piece], rng: np.random.Generator
    ) -> None:
        """Runs pieces among strangers, the first of them in the first rows and the last in the last."""
        logits_left = bucket.num_rows
        mine: list[Item] = []
        for number, (lane, start, end) in enumerate(pieces):
            num_logits = min(end - start, _MAX_LOGITS, logits_left - len(pieces) + number + 1)
            logits_left -= num_logits
            mine.append(
                Item(
                    "mine",
                    bucket.max_running,  # a row of nobody: the row state stays as it is
                    start,
                    end - start,
                    self._tokens[start:end],
                    self._lanes[lane],
                    num_logits,
                )
            )
        rows_left = bucket.num_tokens - sum(item.num_tokens for item in mine)
        slots_left = min(bucket.num_rows - len(mine), logits_left)
        middle = [*mine[1:-1], *self._strangers(bucket, rows_left, slots_left, rng)]
        rng.shuffle(middle)  # pyright: ignore[reportArgumentType]  # any mutable sequence
        items = (*mine[:1], *middle, *mine[1:][-1:])
        ticket = self._executor.dispatch(packer.pack(Iteration(0, items), self._records))
        outputs = [np.asarray(x) for x in jax.tree.leaves(ticket.outputs)]
        row = 0
        for item in items:
            for position in range(item.end - item.num_logits, item.end):
                if item.request_id == "mine":
                    self.seen.add(position, b"".join(x[row].tobytes() for x in outputs), bucket)
                row += 1

    def _strangers(self, bucket: Bucket, rows: int, slots: int, rng: np.random.Generator) -> list[Item]:
        """Returns items of fresh tokens that fill the other rows, as far as pages are left."""
        most = min(rows, slots, len(self._spare))
        if most == 0:
            return []
        count = int(rng.integers(most)) + 1
        pages = min(len(self._spare) // count, bucket.max_pages)
        rows = min(rows, count * min(pages * self._page_size, self._model.max_positions))
        items = []
        for i in range(count):
            size = (i + 1) * rows // count - i * rows // count
            tokens = tuple(rng.integers(self._model.vocab_size, size=size).tolist())
            own = tuple(self._spare[i * pages : (i + 1) * pages])
            items.append(Item("other", bucket.max_running, 0, size, tokens, own, 1))
        return items

    def _bits_of(self, pages: tuple[int, ...]) -> bytes:
        """Returns the bits of a lane's keys and values."""
        lanes = [_read_pages(stage.cache, np.array(pages, np.int32)) for stage in self._executor.stages]
        arrays = (np.asarray(x).transpose(1, 3, 0, 2, 4) for x in jax.tree.leaves(lanes))
        return b"".join(x.reshape(-1, *x.shape[2:])[: len(self._tokens)].tobytes() for x in arrays)


@jax.jit
def _read_pages(cache: KVCache, page_p: jax.Array) -> KVCache:
    """Returns a copy of some pages, with no view of the array, which could no longer be updated in place."""
    return jax.tree.map(lambda x: x[:, page_p], cache)
