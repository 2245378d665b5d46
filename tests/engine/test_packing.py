import functools

import jax
import numpy as np
import pytest

from jorca.config import BucketConfig
from jorca.engine.buckets import Bucket, BucketLadder
from jorca.engine.packing import BucketPacker, Layout
from jorca.engine.records import make_record
from jorca.engine.step import unpack as unpack_buffer
from jorca.request import Request, SamplingParams
from jorca.scheduler import Admission, Item, Iteration, SchedulerLimits

LIMITS = SchedulerLimits(
    max_batch_size=8, max_batch_tokens=16, max_in_flight=1, num_pages=40, page_size=2, max_positions=16
)


def record(params=SamplingParams(temperature=0, seed=0), prompt_ids=(1,)):  # noqa: B008
    request = Request(id="any", prompt_ids=prompt_ids, params=params)
    return make_record(request, stop_ids=frozenset(params.stop_token_ids), vocab_size=60)


GREEDY = record()


def unpack(iteration, records):
    packed = BucketPacker(BucketLadder(LIMITS, BucketConfig()), LIMITS.num_pages).pack(iteration, records)
    return packed, jax.tree.map(
        np.asarray, jax.jit(functools.partial(unpack_buffer, Layout(packed.bucket)))(packed.buffer)
    )


def test_the_papers_batch_of_two_increments_and_two_initiations_lies_end_to_end():
    # Increments with 3 and 1 cached tokens, initiations of 2 and 3 tokens: 7 rows (Orca, figure 5).
    iteration = Iteration(
        9,
        (
            Item("x1", 3, 3, 1, (50,), (10, 11), 1),
            Item("x2", 0, 1, 1, (51,), (12,), 1),
            Item("x3", 5, 0, 2, (52, 53), (13,), 1),
            Item("x4", 1, 0, 3, (54, 55, 56), (2, 7), 1),
        ),
    )
    packed, inputs = unpack(iteration, dict.fromkeys(("x1", "x2", "x3", "x4"), GREEDY))
    assert packed.bucket.num_tokens == 8
    assert inputs.token_ids_t.tolist() == [50, 51, 52, 53, 54, 55, 56, 0]
    assert inputs.positions_t.tolist() == [3, 1, 0, 1, 0, 1, 2, 0]
    assert inputs.metadata.first_row_b.tolist() == [0, 1, 2, 4, 7, 7, 7, 7]
    assert inputs.metadata.num_rows_b.tolist() == [1, 1, 2, 3, 0, 0, 0, 0]
    assert inputs.metadata.kv_len_b.tolist() == [4, 2, 2, 3, 0, 0, 0, 0]
    pages = np.full((8, 8), 40)
    pages[0, :2], pages[1, 0], pages[2, 0], pages[3, :2] = (10, 11), 12, 13, (2, 7)
    assert inputs.metadata.pages_bm.tolist() == pages.tolist()
    assert inputs.logits_row_r.tolist() == [0, 1, 3, 6, 0, 0, 0, 0]
    assert inputs.adjustment.row_r.tolist() == [
        3,
        0,
        5,
        1,
        8,
        8,
        8,
        8,
    ]  # 8 rows exist: padding writes nowhere
    assert inputs.sampling.position_r.tolist() == [4, 2, 2, 3, 0, 0, 0, 0]


def test_logits_come_from_the_true_last_rows_of_prompts_of_different_length():
    iteration = Iteration(
        0,
        (Item("a", 0, 0, 5, (1, 2, 3, 4, 5), (0, 1, 2), 1), Item("b", 1, 0, 7, (6,) * 7, (3, 4, 5, 6), 1)),
    )
    packed, inputs = unpack(iteration, {"a": GREEDY, "b": GREEDY})
    assert packed.bucket.num_tokens == 16
    assert inputs.logits_row_r[:2].tolist() == [4, 11]


def test_a_piece_of_a_prompt_needs_no_logits_and_takes_no_row():
    items = (Item("a", 4, 2, 3, (7, 8, 9), (0, 1, 2), 0), Item("b", 2, 6, 1, (1,), (3, 4, 5, 6), 1))
    _, inputs = unpack(Iteration(0, items), {"a": GREEDY, "b": GREEDY})
    assert inputs.positions_t.tolist() == [2, 3, 4, 6]
    assert inputs.logits_row_r.tolist() == [3, 0, 0, 0]
    assert inputs.adjustment.row_r.tolist() == [2, 8, 8, 8]


def test_a_token_that_is_still_on_the_device_is_named_by_its_row():
    _, inputs = unpack(Iteration(0, (Item("a", 5, 3, 1, None, (0, 1), 1),)), {"a": GREEDY})
    assert inputs.token_ids_t.tolist() == [-1]
    assert (inputs.device_row_t.tolist(), inputs.positions_t.tolist()) == ([5], [3])


def test_sampling_parameters_arrive_bit_for_bit():
    params = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, seed=2**63 - 2, logprobs=0)
    items = (Item("a", 0, 0, 1, (1,), (0,), 1), Item("b", 1, 0, 1, (1,), (1,), 1))
    packed, inputs = unpack(Iteration(0, items), {"a": GREEDY, "b": record(params)})
    sampling = inputs.sampling
    assert sampling.temperature_r.tolist() == [0, np.float32(0.7)]
    assert sampling.top_k_r.tolist() == [0, 40]
    assert sampling.top_p_r.tolist() == [1, np.float32(0.9)]
    assert sampling.min_p_r.tolist() == [0, np.float32(0.05)]
    assert sampling.seed_r2.tolist() == [[0, 0], [2**31 - 1, 2**32 - 2]]
    assert packed.wants_logprobs
    assert inputs.wants_logprobs
    assert packed.admitted == ()


def test_penalties_biases_and_bans_arrive_bit_for_bit_or_as_lists():
    params = SamplingParams(
        repetition_penalty=1.1,
        presence_penalty=-0.3,
        frequency_penalty=0.7,
        logit_bias={9: -2.5, 4: 100},
        min_tokens=3,
        stop_token_ids=[8, 2],
        seed=1,
    )
    items = (Item("a", 0, 0, 1, (1,), (0,), 1), Item("b", 6, 0, 2, (1, 2), (1,), 1))
    admitted = (Admission("a", 0, (1,)), Admission("b", 6, (1, 2)))
    packed, inputs = unpack(Iteration(0, items, admitted), {"a": GREEDY, "b": record(params, (1, 2))})
    rows = inputs.adjustment
    assert rows.repetition_r.tolist() == [1, np.float32(1.1), 1, 1][: len(rows.repetition_r)]
    assert rows.presence_r[:2].tolist() == [0, np.float32(-0.3)]
    assert rows.frequency_r[:2].tolist() == [0, np.float32(0.7)]
    assert rows.num_prompt_r[:2].tolist() == [1, 2]
    assert rows.min_position_r[:2].tolist() == [1, 5]
    assert rows.has_lists_r[:2].tolist() == [0, 1]
    ((row, lists),) = packed.admitted
    assert row == 6
    assert lists.bias_ids_k[:3].tolist() == [9, 4, 60]  # 60 lies behind the vocabulary
    assert lists.bias_k[:3].tolist() == [-2.5, 100, 0]
    assert lists.banned_ids_j[:3].tolist() == [2, 8, 60]


def test_rows_of_a_prompt_whose_logprobs_are_wanted_name_the_token_that_follows():
    params = SamplingParams(temperature=0, seed=0, prompt_logprobs=0)
    records = {"a": record(params, (11, 12, 13, 14)), "b": GREEDY}
    items = (Item("b", 3, 5, 1, (9,), (2,), 1), Item("a", 1, 0, 3, (11, 12, 13), (0, 1), 3))
    packed, inputs = unpack(Iteration(0, items), records)
    assert inputs.logits_row_r.tolist() == [0, 1, 2, 3]
    assert inputs.target_r.tolist() == [-1, 12, 13, 14]
    assert inputs.adjustment.row_r.tolist() == [3, 8, 8, 8]  # only the first is sampled
    assert packed.wants_logprobs
    _, inputs = unpack(Iteration(1, (Item("a", 1, 3, 1, (14,), (0, 1), 1),)), records)
    assert inputs.target_r.tolist() == [-1]
    assert inputs.adjustment.row_r.tolist() == [1]


def test_every_iteration_gets_a_buffer_of_its_own():
    packer = BucketPacker(BucketLadder(LIMITS, BucketConfig()), LIMITS.num_pages)
    iteration = Iteration(0, (Item("a", 0, 0, 1, (1,), (0,), 1),))
    first, second = (packer.pack(iteration, {"a": GREEDY}).buffer for _ in range(2))
    assert not np.shares_memory(first, second)


@pytest.mark.parametrize("num_tokens", [1, 3, 16])
def test_parts_of_the_buffer_do_not_overlap_and_leave_no_gap(num_tokens):
    layout = Layout(Bucket(num_tokens, min(num_tokens, 8), 5, 8))
    buffer = np.zeros(layout.size, np.int32)
    for view in layout.views(buffer).values():
        view += 1
    assert (buffer == 1).all()
