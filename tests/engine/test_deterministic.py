"""`deterministic=True`: a request's tokens and logits depend on nothing but the request, bit for bit."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.device import executor_of, greedy, run, stage_of, tiny_llm
from jorca.attention.xla import XlaAttention
from jorca.config import BucketConfig, ConfigError, ModelConfig
from jorca.engine.buckets import BucketLadder
from jorca.engine.deterministic import prove_bits
from jorca.engine.executor import LocalExecutor
from jorca.engine.llm import LLM
from jorca.engine.packing import BucketPacker
from jorca.engine.records import make_record
from jorca.engine.sizing import smallest_bucket
from jorca.model.adjust import RowState
from jorca.request import Request, SamplingParams
from jorca.scheduler import Item, Iteration, SchedulerLimits
from oracle.numpy_gpt import forward, random_params

CONFIG = ModelConfig(vocab_size=64, max_positions=128, num_layers=2, num_heads=2, d_model=64)
DTYPES = ("float32", "bfloat16")
LADDER = BucketConfig(bucket_ratio=4.0)
FEW, MANY = 24, 200  # requests; the many are for the slow tests
FLOOR = 64  # what the engines below choose by themselves


def deterministic_llm(dtype: str, **options) -> LLM:
    """Buckets of 64 and 256 rows, 8 requests in a batch."""
    sizes = {"max_batch_size": 8, "max_batch_tokens": 256, "page_size": 16, "min_bucket": None}
    config = dataclasses.replace(CONFIG, dtype=dtype)
    return tiny_llm(config, **(sizes | {"bucket_ratio": 4.0, "deterministic": True} | options))


def random_requests(count: int) -> list[Request]:
    """Prompts of 1 to 100 tokens; every other request draws its tokens, in all ways there are."""
    rng = np.random.default_rng(7)
    requests: list[Request] = []
    greedily: dict[str, Any] = {"temperature": 0}
    for i in range(count):
        drawn: dict[str, Any] = {
            "temperature": float(rng.uniform(0.5, 1.5)),
            "top_k": int(rng.choice([0, 5, 20])),
            "top_p": float(rng.choice([1.0, 0.9, 0.5])),
            "min_p": float(rng.choice([0.0, 0.05])),
            "repetition_penalty": float(rng.choice([1.0, 1.2])),
            "frequency_penalty": float(rng.choice([0.0, 0.3])),
        }
        params = SamplingParams(max_tokens=int(rng.integers(1, 7)), seed=i, **(drawn if i % 2 else greedily))
        num_prompt = int(rng.choice([rng.integers(1, 17), rng.integers(17, 101)]))
        prompt = tuple(rng.integers(0, CONFIG.vocab_size, num_prompt).tolist())
        requests.append(Request(id=f"r{i}", prompt_ids=prompt, params=params))
    return requests


Results = dict[str, tuple[tuple[int, ...], bytes]]
"""Tokens and the bits of the logits by request."""


def results(llm: LLM, requests: list[Request], *, each_step: int = 1000) -> Results:
    """Submits some requests before each step, and returns what each gave."""
    coming, got = list(requests), {}
    while coming or llm.engine.has_work:
        for request in coming[:each_step]:
            llm.engine.submit(request)
        del coming[:each_step]
        for output in llm.engine.step():
            if output.finished:
                assert output.logits.dtype == np.float32
                got[output.request_id] = output.token_ids, output.logits.tobytes()
    return got


def case(dtype: str, count: int):
    marks = () if count == FEW else pytest.mark.slow
    return pytest.param((dtype, count), id=f"{dtype}-{count}", marks=marks)


@pytest.fixture(scope="module", params=[case(dtype, count) for dtype in DTYPES for count in (FEW, MANY)])
def dtype_and_count(request):
    return request.param


@pytest.fixture(scope="module")
def dtype(dtype_and_count):
    return dtype_and_count[0]


@pytest.fixture(scope="module")
def llm(dtype):
    return deterministic_llm(dtype)


@pytest.fixture(scope="module")
def requests(dtype_and_count):
    return random_requests(dtype_and_count[1])


in_float32 = pytest.mark.parametrize("dtype_and_count", [case("float32", FEW)], indirect=True, scope="module")
# For tests that start engines of their own: by default in float32 alone.
with_own_engines = pytest.mark.parametrize(
    "dtype_and_count",
    [case("float32", FEW), case("float32", MANY), case("bfloat16", MANY)],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module")
def solo(llm, requests):
    """What each request gives when it is alone."""
    return {name: got for request in requests for name, got in results(llm, [request]).items()}


def shuffled(requests: list[Request], seed: int) -> list[Request]:
    return [requests[i] for i in np.random.default_rng(seed).permutation(len(requests))]


def test_in_a_crowd_and_in_other_orders_of_arrival(llm, requests, solo):
    assert results(llm, requests) == solo
    assert results(llm, shuffled(requests, 1)) == solo
    assert results(llm, shuffled(requests, 2), each_step=2) == solo


@with_own_engines
@pytest.mark.parametrize("max_batch_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 70))])
def test_under_another_max_batch_size(dtype, requests, solo, max_batch_size):
    other = deterministic_llm(dtype, max_batch_size=max_batch_size, num_pages=64)
    assert results(other, shuffled(requests, 3), each_step=5) == solo


def test_resumed_from_the_middle(llm, requests, solo):
    rng = np.random.default_rng(4)
    resumed, right = [], {}
    for request in requests:
        tokens, logits = solo[request.id]
        done = int(rng.integers(len(tokens)))
        resumed.append(dataclasses.replace(request, output_ids=tokens[:done]))
        right[request.id] = tokens, logits[done * CONFIG.vocab_size * 4 :]
    assert results(llm, resumed, each_step=3) == right


@with_own_engines
def test_resumed_in_pieces_where_an_iteration_holds_few_tokens(dtype, requests, solo):
    small = deterministic_llm(dtype, max_batch_tokens=16)
    resumed, right = [], {}
    for request in requests:
        tokens, logits = solo[request.id]
        # A prompt of 16 or fewer, and the rest of it as if it had been output.
        cut, most = request.prompt_ids[:16], len(request.prompt_ids) + len(tokens) - 16
        if request.params.temperature == 0 and most > len(tokens):
            known = request.prompt_ids[16:]
            params = dataclasses.replace(request.params, max_tokens=most)
            resumed.append(Request(id=request.id, prompt_ids=cut, params=params, output_ids=known))
            right[request.id] = known + tokens, logits
    assert len(resumed) > len(requests) // 8
    pieces = []
    forget = small.engine.observe(lambda iteration, _: pieces.extend(i.num_tokens for i in iteration.items))
    assert results(small, resumed) == right
    forget()
    assert 1 < max(pieces) <= 16


def test_fed_by_hand_in_random_pieces(llm, requests, solo):
    """Prompt and output in pieces of random sizes, four requests at a time."""
    rng = np.random.default_rng(5)
    executor = executor_of(llm)
    limits = llm.engine.scheduler.limits
    packer = BucketPacker(BucketLadder(limits, LADDER, floor=FLOOR), limits.num_pages)
    records = {r.id: make_record(r, stop_ids=frozenset(), vocab_size=CONFIG.vocab_size) for r in requests}
    tables = rng.permutation(limits.num_pages)[: 4 * 8].reshape(4, 8).tolist()
    num_checked = 0
    for group in range(0, len(requests), 4):
        four = requests[group : group + 4]
        known = [request.prompt_ids + solo[request.id][0] for request in four]
        fed = [0] * len(four)
        while live := [i for i in range(len(four)) if fed[i] < len(known[i]) - 1]:
            items = []
            for i in rng.permutation(live).tolist():
                num_tokens = int(rng.integers(1, rng.choice([2, 5, 90])))
                end = min(fed[i] + num_tokens, len(known[i]) - 1)
                ids = known[i][fed[i] : end]
                last = end >= len(four[i].prompt_ids)
                items.append(Item(four[i].id, i, fed[i], len(ids), ids, tuple(tables[i]), int(last)))
                fed[i] = end
            packed = packer.pack(Iteration(0, tuple(items)), records)
            result = executor.collect(executor.dispatch(packed))
            for item, got in zip(items, result.items, strict=True):
                if item.num_logits:
                    request = four[item.row]
                    tokens, logits = solo[request.id]
                    at, size = item.end - len(request.prompt_ids), CONFIG.vocab_size * 4
                    assert got.token_ids == (tokens[at],)
                    assert got.logits.tobytes() == logits[at * size : (at + 1) * size]
                    num_checked += 1
    assert num_checked > len(requests)


@in_float32
def test_the_logits_are_those_of_the_numpy_oracle(llm):
    prompt = np.random.default_rng(6).integers(0, CONFIG.vocab_size, 90).tolist()
    params = random_params(CONFIG, 0)
    got = run(llm, [greedy("a", prompt, 4)])["a"]
    for row in got:
        right = forward(CONFIG, params, prompt)[-1]
        assert np.abs(row - right).max() < 1e-5 * np.abs(right).max()
        prompt.append(int(right.argmax()))


@with_own_engines
def test_the_same_tokens_whether_or_not_logits_are_returned(dtype, llm):
    requests = random_requests(8)
    right = {name: tokens for name, (tokens, _) in results(llm, requests).items()}
    silent = deterministic_llm(dtype, return_logits=False)
    got = {}
    for request in requests:
        silent.engine.submit(request)
    while silent.engine.has_work:
        for output in silent.engine.step():
            assert output.logits is None
            got[output.request_id] = output.token_ids
    assert got == right


class TestProbe:
    def test_it_leaves_everything_as_new_and_never_holds_a_second_kv_array(self, monkeypatch):
        num_pages, dispatch, counts = 64, LocalExecutor.dispatch, []
        shape = (CONFIG.num_layers, num_pages, CONFIG.num_heads, 16, CONFIG.head_dim)

        def count() -> int:
            return sum(x.shape == shape for x in jax.live_arrays())

        def counting(executor, packed):
            counts.append(count())
            return dispatch(executor, packed)

        monkeypatch.setattr(LocalExecutor, "dispatch", counting)
        before = count()
        llm = deterministic_llm("float32", num_pages=num_pages)
        assert len(counts) > 2  # the probe has run
        assert set(counts) == {before + 2}  # keys and values
        stage, scheduler = stage_of(llm), llm.engine.scheduler
        assert all(not np.asarray(x).any() for x in jax.tree.leaves(stage.cache))
        state = RowState.allocate(scheduler.limits.max_running, CONFIG.max_positions)
        jax.tree.map(np.testing.assert_array_equal, stage.state, state)
        assert scheduler.num_free_pages == num_pages
        assert not llm.engine.has_work
        numbers = []
        llm.engine.observe(lambda iteration, _: numbers.append(iteration.seq))
        run(llm, [greedy("a", [1, 2, 3], 2)])
        assert numbers == [0, 1]

    def test_a_ladder_that_crosses_a_bit_group_is_refused(self):
        # A bucket of one row takes a matrix-vector product, which sums in another order on every CPU.
        message = re.escape("those of [1] tokens do not agree with those of [64]; set min_bucket=64")
        with pytest.raises(ConfigError, match=f"^deterministic needs .* {message}$"):
            tiny_llm(
                dataclasses.replace(CONFIG, num_layers=1),
                deterministic=True,
                min_bucket=1,
                bucket_ratio=64.0,
                max_batch_size=1,
            )

    @pytest.mark.slow
    def test_a_walk_of_its_own_for_single_tokens_is_refused(self, monkeypatch):
        monkeypatch.setattr("jorca.engine.build._attention", lambda *_: XlaAttention())
        with pytest.raises(ConfigError, match=r"^deterministic must be False .* the bucket of 64 tokens"):
            deterministic_llm("float32", max_batch_tokens=64)

    def prove(self, llm, monkeypatch, **nudged):
        """Runs the probe with some programs replaced."""
        executor = executor_of(llm)
        ladder = BucketLadder(llm.engine.scheduler.limits, LADDER, floor=FLOOR)
        small, large = ladder.buckets
        assert (small.num_tokens, large.num_tokens) == (64, 256)
        programs = {
            bucket: nudged.get(name, lambda program: program)(stage_of(llm).programs[bucket])
            for name, bucket in (("small", small), ("large", large))
        }
        monkeypatch.setattr(stage_of(llm), "programs", programs)
        try:
            prove_bits(executor, ladder, llm.config)
        finally:
            executor.reset()

    @in_float32
    def test_one_bit_of_difference_between_buckets_is_seen_in_what_a_step_returns(self, llm, monkeypatch):
        def other_logit(program):
            def step(*args):
                cache, state, out = program(*args)
                logits_rv = out.logits_rv.at[:, 7].set(jnp.nextafter(out.logits_rv[:, 7], jnp.inf))
                return cache, state, dataclasses.replace(out, logits_rv=logits_rv)

            return step

        self.prove(llm, monkeypatch)
        with pytest.raises(ConfigError, match=r"\[64\] tokens do not agree .* \[256\]; set min_bucket=256"):
            self.prove(llm, monkeypatch, small=other_logit)

    @in_float32
    def test_one_wrong_number_in_the_kv_array_is_seen(self, llm, monkeypatch):
        def other_key(program):
            def step(*args):
                cache, state, out = program(*args)
                keys = cache.keys_lpnsh
                keys = keys.at[1, :, 0, 3, 5].set(-keys[1, :, 0, 3, 5])
                return dataclasses.replace(cache, keys_lpnsh=keys), state, out

            return step

        with pytest.raises(ConfigError, match=r"\[64\] tokens do not agree .* \[256\]; set min_bucket=256"):
            self.prove(llm, monkeypatch, small=other_key)

    @in_float32
    def test_bits_that_depend_on_the_place_in_the_largest_bucket_are_refused_for_good(self, llm, monkeypatch):
        def other_logprob_in_odd_rows(program):
            def step(*args):
                cache, state, out = program(*args)
                odd_r = (jnp.arange(len(out.logprob_r)) % 2).astype(jnp.float32)
                return cache, state, dataclasses.replace(out, logprob_r=out.logprob_r + odd_r)

            return step

        with pytest.raises(ConfigError, match=r"deterministic must be False .* the bucket of 256 tokens"):
            self.prove(llm, monkeypatch, large=other_logprob_in_odd_rows)


class TestFloor:
    limits = SchedulerLimits(
        max_batch_size=8, max_batch_tokens=256, max_in_flight=1, num_pages=32, page_size=4, max_positions=32
    )

    def shapes(self, floor, **limits):
        ladder = BucketLadder(dataclasses.replace(self.limits, **limits), LADDER, floor=floor)
        return [(bucket.num_tokens, bucket.num_rows) for bucket in ladder.buckets]

    def test_rows_of_tokens_and_of_logits_are_multiples_of_the_floor(self):
        assert self.shapes(64) == [(64, 64), (256, 64)]
        assert self.shapes(64, max_batch_tokens=5) == [(64, 64)]
        assert self.shapes(16, max_batch_size=40) == [(16, 16), (48, 48), (64, 48), (256, 48)]
        assert self.shapes(16, max_batch_tokens=250) == [(16, 16), (64, 16), (256, 16)]

    @pytest.mark.parametrize("max_batch_size", [1, 63, 64, 65, 200])
    def test_all_ladders_share_their_smallest_bucket(self, max_batch_size):
        for max_batch_tokens in (1, 64, 100, 1000):
            shapes = self.shapes(64, max_batch_size=max_batch_size, max_batch_tokens=max_batch_tokens)
            assert shapes[0] == (64, 64)

    @pytest.mark.parametrize(
        ("d_model", "vocab_size", "rows"),
        [(768, 50257, 64), (64, 64, 64), (62, 64, 128), (48, 500, 128), (16, 500, 256), (64, 10, 512)],
    )
    def test_the_default_pads_narrow_models_to_more_rows(self, d_model, vocab_size, rows):
        model = dataclasses.replace(
            CONFIG, d_model=d_model, vocab_size=vocab_size, padded_vocab_size=vocab_size
        )
        assert smallest_bucket(model, BucketConfig()) == rows
        assert smallest_bucket(model, BucketConfig(min_bucket=24)) == 24
