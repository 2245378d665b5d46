"""The engine on eight virtual devices: the same answers on every mesh, and what programs exchange."""

import collections
import dataclasses
import math
import random
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from engine.device import device_params, executor_of, tiny_llm
from jorca import LLM, ModelConfig, SamplingParams
from jorca.config import ConfigError, MeshConfig
from jorca.engine.buckets import Bucket
from jorca.engine.executor import LocalExecutor
from jorca.engine.packing import PackedBatch
from jorca.model.params import num_params, param_table
from jorca.planning import COLLECTIVES, read_operations
from jorca.request import Request
from jorca.scheduler import Item, Iteration
from jorca.sharding import make_stages
from oracle.numpy_gpt import forward

ADDER = Path(__file__).parents[2] / "checkpoints" / "adder"
# Nothing but heads and feed-forward width divides by the sizes of the meshes.
CONFIG = ModelConfig(vocab_size=37, max_positions=24, num_layers=9, num_heads=8, d_model=16, d_ff=24)
ALL = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)]
USUAL = [(1, 8), (4, 2)]
BOUND = 1e-5


def slowly(*meshes):
    return [pytest.param(*mesh, marks=pytest.mark.slow) for mesh in meshes]


def llm_on(stages, tensor, config=CONFIG, **options):
    """One bucket, and an array far larger than all else, so that many tests share the programs of a mesh."""
    sizes = {"min_bucket": 32, "max_batch_tokens": 32, "max_batch_size": 4, "page_size": 4, "num_pages": 4000}
    return tiny_llm(config, device_params(config), stages=stages, tensor=tensor, **(sizes | options))


@pytest.fixture(scope="module")
def requests():
    """Greedy and sampled ones of mixed lengths, with every kind of change to the logits."""
    draw = random.Random(3)
    variety = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 9, "seed": 4},
        {"temperature": 1.1, "top_p": 0.8, "min_p": 0.02, "seed": 5},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {36: 1.0, 0: -2.0}},
        {"temperature": 0.9, "presence_penalty": 0.4, "frequency_penalty": 0.2, "seed": 6},
        {"temperature": 0.0, "logprobs": 3, "min_tokens": 2, "stop_token_ids": (5,)},
    ]
    return [
        Request(
            id=f"r{i}",
            prompt_ids=tuple(draw.randrange(37) for _ in range(draw.randint(1, 12))),
            params=SamplingParams(max_tokens=draw.randint(4, 10), **({"seed": i} | variety[i % 6])),
        )
        for i in range(18)
    ]


def serve(llm, requests, seed=0, aborts=()):
    """Runs requests that arrive at random; returns final outputs by id."""
    draw = random.Random(seed)
    coming, outputs = list(requests), {}
    while coming or llm.engine.has_work:
        for _ in range(min(draw.randrange(3), len(coming))):
            llm.engine.submit(coming.pop(0))
        for output in llm.engine.step():
            if output.request_id in aborts and len(output.token_ids) >= 2 and not output.finished:
                output = llm.engine.abort(output.request_id)
            if output.finished:
                outputs[output.request_id] = output
    llm.engine.scheduler.check_integrity()
    return outputs


@pytest.fixture(scope="module")
def right(requests):
    return serve(llm_on(1, 1), requests)


def check_same(outputs, right, aborted=()):
    assert outputs.keys() == right.keys()
    for name, output in outputs.items():
        n = len(output.token_ids)
        assert n == 2 if name in aborted else n == len(right[name].token_ids)
        assert output.token_ids == right[name].token_ids[:n]
        difference = np.abs(output.logits - right[name].logits[:n]).max()
        assert difference < BOUND * np.abs(right[name].logits).max()


def test_one_device_gives_the_logits_of_the_numpy_oracle(requests, right):
    params = {name: np.asarray(x) for name, x in device_params(CONFIG).items()}
    for request in requests:
        output = right[request.id]
        ids = [*request.prompt_ids, *output.token_ids]
        expected = forward(CONFIG, params, ids)[len(request.prompt_ids) - 1 : -1]
        assert np.abs(output.logits - expected).max() < BOUND * np.abs(expected).max()


@pytest.mark.parametrize(
    ("stages", "tensor"),
    [*USUAL, *slowly(*(mesh for mesh in ALL[1:] if mesh not in USUAL))],
)
def test_every_mesh_gives_the_tokens_and_logits_of_one_device(stages, tensor, requests, right):
    llm = llm_on(stages, tensor)
    check_same(serve(llm, requests), right)
    # Three leave while they are in flight; nobody else notices, and their pages come back.
    aborted = {name for name, output in right.items() if len(output.token_ids) > 3}
    aborted = set(sorted(aborted)[:3])
    check_same(serve(llm, requests, seed=1, aborts=aborted), right, aborted)
    assert llm.engine.scheduler.num_reserved_pages == 0


def test_padded_rows_of_the_vocabulary_are_never_seen(requests, right):
    llm = llm_on(1, 8)
    (stage,) = executor_of(llm).stages
    assert stage.params["embed.tokens"].shape == (40, 16)
    assert all(output.logits.shape[1] == 37 for output in right.values())


@pytest.mark.parametrize("num_sums", [200, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("stages", "tensor"), [(1, 3), (2, 1)])
def test_the_adder_is_right_with_its_three_heads_and_layers_apart(stages, tensor, num_sums):
    sizes: dict[str, Any] = {"max_batch_size": 32, "page_size": 2, "min_bucket": 128, "max_batch_tokens": 128}
    llm = LLM(ADDER, stages=stages, tensor=tensor, **sizes)
    pairs = random.Random(7).sample([(a, b) for a in range(100) for b in range(100)], num_sums)
    prompts = [[a // 10, a % 10, b // 10, b % 10] for a, b in pairs]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=3, temperature=0))
    sums = [int("".join(map(str, output.token_ids[::-1]))) for output in outputs]
    assert sums == [a + b for a, b in pairs]


@pytest.mark.parametrize("tensor", [2, 4])
def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_would_do(tensor):
    message = (
        f"^tensor must divide num_heads and d_ff, got tensor {tensor} with num_heads 3 and d_ff 192; "
        "sizes that do: 1, 3$"
    )
    with pytest.raises(ConfigError, match=message):
        LLM(ADDER, tensor=tensor)


class TestPrograms:
    @staticmethod
    def exchanges(program):
        return [op for op in read_operations(program.as_text()) if op.kind in COLLECTIVES]

    @pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.slow)])
    def test_a_layer_sums_over_devices_twice_and_nothing_else_is_exchanged(self, tensor):
        counts = {}
        for num_layers in (2, 5):
            config = dataclasses.replace(CONFIG, num_layers=num_layers)
            for runner in executor_of(llm_on(2, tensor, config, return_logits=False)).stages:
                (program,) = runner.programs.values()
                exchanges = self.exchanges(program)
                # Outside of the sampler's loops and branches.
                counted = collections.Counter(op.kind for op in exchanges if op.in_entry)
                counts[num_layers, runner.stage.index] = counted
                # Log-probabilities gather logits, in a branch for those who ask: rows, padded vocabulary.
                gathered = {shape for op in exchanges if op.kind == "all-gather" for shape in op.shapes}
                assert {shape.partition("[")[2] for shape in gathered} <= {"4,38]", "4,40]"}
        # The embedding is one sum more; the greedy choice and the test for NaN are three small ones.
        assert counts[2, 0] == {"all-reduce": 1 * 2 + 1}
        assert counts[5, 0] == {"all-reduce": 3 * 2 + 1}
        assert counts[2, 1] == {"all-reduce": 1 * 2 + 3}
        assert counts[5, 1] == {"all-reduce": 2 * 2 + 3}

    @pytest.mark.parametrize(("stages", "tensor"), [*slowly((1, 2), (2, 4)), *USUAL])
    def test_the_kv_array_is_updated_in_place_on_every_device(self, stages, tensor):
        llm = llm_on(stages, tensor)
        for runner in executor_of(llm).stages:
            part = runner.cache.keys_lpnsh.addressable_shards[0].data.nbytes * 2
            assert part * tensor == runner.cache.nbytes
            (program,) = runner.programs.values()
            memory = program.memory_analysis()
            assert memory.alias_size_in_bytes >= part
            assert memory.temp_size_in_bytes < part / 10

        def places():
            return [
                shard.data.unsafe_buffer_pointer()
                for runner in executor_of(llm).stages
                for x in (runner.cache.keys_lpnsh, runner.cache.values_lpnsh)
                for shard in x.addressable_shards
            ]

        before = places()
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        assert places() == before

    def test_bytes_of_a_device_fall_as_the_devices_grow(self):
        config = ModelConfig(
            vocab_size=64, max_positions=16, num_layers=8, num_heads=8, d_model=128, tie_embeddings=False
        )
        sizes = {}
        for stages, tensor in ALL:
            sizes[stages, tensor] = max(
                sum(
                    math.prod(sharding.shard_shape(param_table(config)[name].shape))
                    for name, sharding in stage.param_shardings(config).items()
                )
                for stage in make_stages(config, MeshConfig(stages=stages, tensor=tensor))
            )
        for (stages, tensor), size in sizes.items():
            assert size == pytest.approx(num_params(config) / (stages * tensor), rel=0.05)


class TestPipeline:
    def test_a_token_that_only_the_last_stage_has_is_refused_in_the_first(self):
        executor = LocalExecutor(CONFIG, (), stages=make_stages(CONFIG, MeshConfig(stages=2)))
        iteration = Iteration(0, (Item("0", 0, 2, 1, None, (0,), 1),))
        nothing = np.zeros(0, np.int32)
        packed = PackedBatch(iteration, Bucket(1, 1, 1, 1), nothing, nothing, False, ())
        with pytest.raises(ValueError, match="the first cannot feed tokens that only the last one has"):
            executor.dispatch(packed)

    @pytest.mark.parametrize(("stages", "tensor"), [(4, 2), *slowly((2, 1), (4, 1))])
    def test_as_many_iterations_are_in_flight_as_there_are_stages(self, stages, tensor):
        llm = llm_on(stages, tensor)
        in_flight = []
        llm.engine.observe(lambda *_: in_flight.append(llm.engine.scheduler.num_in_flight + 1))
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        llm.generate([[i, 1, 2] for i in range(4 * stages)], params)
        assert max(in_flight) == stages
        steady = in_flight[stages:-stages]
        assert len(steady) > 12
        assert set(steady) == {stages}

    def test_a_request_that_leaves_between_two_stages_harms_nobody(self, requests, right):
        """Aborted when the first of three iterations in flight has left stage 0 and not yet the last."""
        llm = llm_on(3, 1, max_batch_size=2)
        executor = executor_of(llm)
        victims, started = iter(["r1", "r7", "r14"]), collections.deque()
        aborted = {}
        victim = next(victims)

        def abort_in_between(iteration, stage, _):
            nonlocal victim
            started.append((iteration.seq, stage))
            names = {item.request_id for item in iteration.items}
            if stage == 1 and victim in names and llm.engine.scheduler.num_in_flight == 3:
                aborted[victim] = llm.engine.abort(victim)
                victim = next(victims, None)

        executor.watch = abort_in_between
        outputs = serve(llm, requests, seed=2)
        assert set(aborted) == {"r1", "r7", "r14"}
        others = {name: output for name, output in right.items() if name not in aborted}
        check_same({name: outputs[name] for name in others}, others)
        assert llm.engine.scheduler.num_reserved_pages == 0

    def test_the_first_stage_goes_on_while_a_later_one_is_slow(self):
        llm = llm_on(2, 1, max_batch_size=1)
        executor = executor_of(llm)
        first, second = executor.stages
        delay = jax.jit(
            lambda x: jax.pure_callback(lambda x: (time.sleep(0.05), np.asarray(x))[1], x, x),
        )
        steps = dict(second.programs)
        second.programs = {
            bucket: lambda params, cache, state, x, buffer, step=step: step(
                params, cache, state, delay(x), buffer
            )
            for bucket, step in steps.items()
        }
        ends: dict[tuple[int, int], float] = {}
        threads = []

        def watch(iteration, stage, arrays):
            def wait():
                jax.block_until_ready(arrays)
                ends[iteration.seq, stage] = time.perf_counter()

            threads.append(threading.Thread(target=wait))
            threads[-1].start()

        executor.watch = watch
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        llm.generate([[1, 2, 3], [4, 5, 6]], params)
        for thread in threads:
            thread.join()
        assert first.stage.index == 0
        num = max(seq for seq, _ in ends) + 1
        assert num == 12
        # Iteration i + 1 has left stage 0 before i has left stage 1, all but at the ends.
        assert all(ends[i + 1, 0] < ends[i, 1] for i in range(1, num - 2))
