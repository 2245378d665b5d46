"""What travels between processes, and the digests that show who diverges."""

import dataclasses

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jorca.config import BucketConfig, EngineConfig, ModelConfig
from jorca.engine.buckets import BucketLadder
from jorca.engine.packing import BucketPacker
from jorca.engine.records import make_record
from jorca.engine.wire import (
    RunningDigest,
    batch_from_plain,
    batch_to_plain,
    group_facts,
    outputs_from_plain,
    outputs_to_plain,
)
from jorca.request import Request, SamplingParams
from jorca.scheduler import Admission, Item, Iteration, SchedulerLimits

LIMITS = SchedulerLimits(
    max_batch_size=4, max_batch_tokens=16, max_in_flight=2, num_pages=12, page_size=4, max_positions=24
)
LADDER = BucketLadder(LIMITS, BucketConfig())


def packed(seq=3, tokens=(5, 6, 7), bias=1.5):
    requests = {
        "a": Request(id="a", prompt_ids=tokens, params=SamplingParams(seed=1, logit_bias={3: bias})),
        "b": Request(id="b", prompt_ids=(1, 2), params=SamplingParams(seed=2, logprobs=2)),
    }
    records = {name: make_record(r, stop_ids=frozenset(), vocab_size=37) for name, r in requests.items()}
    items = (Item("a", 0, 0, len(tokens), tokens, (4, 5), 1), Item("b", 1, 2, 1, None, (7,), 1))
    iteration = Iteration(seq, items, (Admission("a", 0, tokens),))
    return BucketPacker(LADDER, LIMITS.num_pages).pack(iteration, records)


def over_the_wire(data):
    return msgpack.unpackb(msgpack.packb(data))


def test_a_packed_batch_arrives_as_it_was():
    sent = packed()
    got = batch_from_plain(over_the_wire(batch_to_plain(sent)), LADDER)
    assert (got.iteration, got.bucket, got.wants_logprobs) == (sent.iteration, sent.bucket, True)
    assert got.buffer.dtype == np.int32
    assert np.array_equal(got.buffer, sent.buffer)
    assert np.array_equal(got.target_r, sent.target_r)
    assert np.shares_memory(got.target_r, got.buffer)
    ((row, lists),) = sent.admitted
    ((got_row, got_lists),) = got.admitted
    assert row == got_row == 0
    for field in dataclasses.fields(lists):
        one, other = getattr(lists, field.name), getattr(got_lists, field.name)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


@given(
    rows=st.integers(1, 5),
    columns=st.integers(0, 4),
    dtype=st.sampled_from([np.int32, np.float32]),
    seed=st.integers(0, 9),
)
def test_outputs_arrive_bit_for_bit(rows, columns, dtype, seed):
    bits = np.random.default_rng(seed).integers(0, 2**32, (rows, columns), np.uint32)
    sent = {"tokens_r2": bits.view(np.int32), "logits_rv": bits.view(dtype)}
    got = outputs_from_plain(over_the_wire(outputs_to_plain(sent)))
    assert got.keys() == sent.keys()
    for name, x in sent.items():
        assert (got[name].dtype, got[name].shape, got[name].tobytes()) == (x.dtype, x.shape, x.tobytes())


class TestDigest:
    def test_the_same_plans_have_the_same_digests_on_both_sides(self):
        here, there = RunningDigest(), RunningDigest()
        for seq in range(3):
            batch = packed(seq)
            other = batch_from_plain(over_the_wire(batch_to_plain(batch)), LADDER)
            assert here.add_plan(batch) == there.add_plan(other)

    @pytest.mark.parametrize("change", [{"seq": 4}, {"tokens": (5, 6, 8)}, {"bias": 1.25}])
    def test_once_plans_differ_their_digests_do_for_ever(self, change):
        here, there = RunningDigest(), RunningDigest()
        assert here.add_plan(packed()) != there.add_plan(packed(**change))
        assert here.add_plan(packed(5)) != there.add_plan(packed(5))

    def test_so_it_is_with_tokens(self):
        here, there = RunningDigest(), RunningDigest()
        same = {"tokens_r2": np.array([[1, 1], [2, 1]], np.int32)}
        assert here.add_tokens(0, same) == there.add_tokens(0, same)
        other = {"tokens_r2": np.array([[1, 1], [3, 1]], np.int32)}
        assert here.add_tokens(1, same) != there.add_tokens(1, other)
        assert here.add_tokens(2, same) != there.add_tokens(2, same)


def test_facts_name_all_that_must_be_the_same_and_nothing_else():
    model = ModelConfig(vocab_size=37, max_positions=24, num_layers=2, num_heads=2, d_model=16)
    facts = group_facts(model, EngineConfig.from_options(page_size=8, seed=1, stages=2))
    assert facts["model.vocab_size"] == 37
    assert facts["engine.cache.page_size"] == 8
    assert facts["engine.mesh.stages"] == 2
    assert {"jorca", "jax", "jaxlib", "num_processes"} < facts.keys()
    assert not any("seed" in name or "secret" in name or "process_id" in name for name in facts)
    assert over_the_wire(facts) == facts
    others = group_facts(model, EngineConfig.from_options(page_size=8, seed=2, stages=2))
    assert facts == others
