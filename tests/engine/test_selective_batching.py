"""Selective batching equals one by one, and bits do not depend on neighbours (real compiled steps)."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.device import device_params, greedy, run, stage_of, tiny_llm
from jorca.config import ModelConfig
from oracle.numpy_gpt import forward, random_params

CONFIG = ModelConfig(
    vocab_size=37, max_positions=24, num_layers=2, num_heads=2, d_model=16, tie_embeddings=False
)
RNG = np.random.default_rng(0)
PROMPTS = {f"r{i}": RNG.integers(0, 37, n).tolist() for i, n in enumerate((5, 7, 1, 12, 3, 9, 2, 16))}


def greedy_by_oracle(config, params, prompt, max_tokens):
    """Token by token with the whole sequence computed anew: ids and logits."""
    ids, rows = list(prompt), []
    for _ in range(max_tokens):
        rows.append(forward(config, params, ids)[-1])
        ids.append(int(rows[-1].argmax()))
    return np.stack(rows)


@pytest.fixture(scope="module")
def llm():
    """One engine for many tests: each leaves it without a request."""
    llm = tiny_llm(CONFIG, max_batch_size=8, page_size=4)
    yield llm
    assert llm.engine.scheduler.num_reserved_pages == 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_crowd_of_mixed_lengths_equals_the_numpy_oracle_token_by_token(page_size):
    llm = tiny_llm(CONFIG, max_batch_size=5, page_size=page_size, min_bucket=64)
    got = run(llm, [greedy(name, prompt, 6) for name, prompt in PROMPTS.items()])
    params = random_params(CONFIG, 0)
    for name, prompt in PROMPTS.items():
        right = greedy_by_oracle(CONFIG, params, prompt, 6)
        assert np.abs(got[name] - right).max() < 1e-5 * np.abs(right).max()
        assert got[name].argmax(-1).tolist() == right.argmax(-1).tolist()


def test_the_batch_equals_one_by_one_and_the_numpy_oracle(llm):
    crowd = run(llm, [greedy(n, p, 6) for n, p in PROMPTS.items()])
    params = random_params(CONFIG, 0)
    for name, prompt in PROMPTS.items():
        right = greedy_by_oracle(CONFIG, params, prompt, 6)
        assert np.abs(crowd[name] - right).max() < 1e-5 * np.abs(right).max()
        (one,) = run(llm, [greedy(name, prompt, 6)]).values()
        assert np.abs(crowd[name] - one).max() < 1e-5 * np.abs(one).max()
        assert crowd[name].argmax(-1).tolist() == one.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_a_fixed_bucket_bits_do_not_depend_on_neighbours_or_place(dtype):
    config = dataclasses.replace(CONFIG, dtype=dtype)
    # One bucket of 64 rows, whatever runs.
    llm = tiny_llm(config, max_batch_size=8, max_batch_tokens=64, min_bucket=64, page_size=4)
    mine = greedy("mine", PROMPTS["r3"], 8)
    right = run(llm, [mine])["mine"]
    rng = np.random.default_rng(1)
    for trial in range(12):
        others = [
            greedy(f"o{i}", rng.integers(0, 37, rng.integers(1, 9)).tolist(), int(rng.integers(1, 8)))
            for i in range(trial % 8)
        ]
        place = int(rng.integers(0, len(others) + 1))
        got = run(llm, [*others[:place], mine, *others[place:]])["mine"]
        assert got.tobytes() == right.tobytes()


@pytest.mark.parametrize("min_bucket", [24, 64])
def test_the_size_of_the_bucket_changes_nothing_but_rounding(llm, min_bucket):
    sizes = {"max_batch_tokens": min_bucket, "min_bucket": min_bucket}  # one bucket
    padded_llm = tiny_llm(CONFIG, max_batch_size=8, page_size=4, **sizes)
    small = run(llm, [greedy("a", PROMPTS["r1"], 4)])["a"]
    padded = run(padded_llm, [greedy("a", PROMPTS["r1"], 4)])["a"]
    assert np.abs(small - padded).max() < 1e-5 * np.abs(small).max()


def test_a_kv_array_full_of_nan_at_the_start_changes_no_bit(llm):
    requests = [greedy(name, prompt, 6) for name, prompt in PROMPTS.items()]
    right = run(llm, requests)
    stage = stage_of(llm)
    stage.cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), stage.cache)
    got = run(llm, requests)
    assert {n: x.tobytes() for n, x in got.items()} == {n: x.tobytes() for n, x in right.items()}


def test_slots_of_nobody_stay_untouched_and_padding_writes_nowhere():
    llm = tiny_llm(CONFIG, max_batch_size=4, page_size=4, num_pages=8, min_bucket=64)
    stage = stage_of(llm)
    stage.cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), stage.cache)
    written = np.zeros((8, 4), bool)

    def note(iteration, _):
        for item in iteration.items:
            for position in range(item.start, item.end):
                written[item.pages[position // 4], position % 4] = True

    llm.engine.observe(note)
    run(llm, [greedy("a", PROMPTS["r0"], 5), greedy("b", PROMPTS["r2"], 3), greedy("c", PROMPTS["r3"], 3)])
    assert written.any()
    assert not written.all()
    for pages in (stage.cache.keys_lpnsh, stage.cache.values_lpnsh):
        finite_lps = np.isfinite(np.asarray(pages)).all(axis=(2, 4))
        assert (finite_lps == written[None]).all()


def test_the_last_slot_of_a_full_array_survives_a_padded_batch():
    # 24 + 8 positions fill all 8 pages of 4: a wrapped index of padding would hit the last one.
    llm = tiny_llm(CONFIG, max_batch_size=4, page_size=4, num_pages=8, min_bucket=64)
    requests = [greedy("a", PROMPTS["r7"], 9), greedy("b", PROMPTS["r2"], 8)]
    got = run(llm, requests)
    params = random_params(CONFIG, 0)
    for request in requests:
        right = greedy_by_oracle(CONFIG, params, request.prompt_ids, request.params.max_tokens)
        assert np.abs(got[request.id] - right).max() < 1e-5 * np.abs(right).max()


def test_the_kv_array_is_aliased_and_keeps_its_place_over_100_iterations():
    # An array far larger than everything else, so that a copy of it could not hide in the scratch memory.
    llm = tiny_llm(CONFIG, max_batch_size=4, page_size=4, num_pages=4000, min_bucket=64)
    stage = stage_of(llm)
    for program in stage.programs.values():
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= stage.cache.nbytes
        assert memory.temp_size_in_bytes < stage.cache.nbytes / 10

    def places():
        return [x.unsafe_buffer_pointer() for x in (stage.cache.keys_lpnsh, stage.cache.values_lpnsh)]

    before, iterations = places(), 0
    while iterations < 100:
        llm.engine.submit(greedy(f"r{iterations}", PROMPTS["r0"], 10))
        while llm.engine.has_work:
            llm.engine.step()
            iterations += 1
            assert places() == before


def test_pieces_of_a_resumed_request_equal_one_whole_prompt(llm):
    prompt, done = PROMPTS["r0"], [3, 1, 4, 1, 5, 9, 2, 6]
    whole = dataclasses.replace(greedy("a", [*prompt, *done], 3), id="a")
    right = run(llm, [whole])["a"]
    resumed = dataclasses.replace(greedy("a", prompt, len(done) + 3), output_ids=tuple(done))
    got = run(tiny_llm(CONFIG, max_batch_size=4, max_batch_tokens=5), [resumed])["a"]
    assert np.abs(got - right).max() < 1e-5 * np.abs(right).max()


def test_50_runs_of_requests_that_join_at_different_times_are_identical(llm):
    names, seen = ("r0", "r3", "r2"), set()
    for _ in range(50):
        coming, logits = list(names), {}
        while coming or llm.engine.has_work:
            if coming:
                llm.engine.submit(greedy(coming[0], PROMPTS[coming.pop(0)], 6))
            for output in llm.engine.step() + llm.engine.step():
                if output.finished:
                    logits[output.request_id] = output.logits.tobytes()
        seen.add(tuple(logits[name] for name in names))
    assert len(seen) == 1


def test_a_row_that_is_not_finite_ends_in_error_alone():
    params = device_params(CONFIG)
    params["embed.tokens"] = params["embed.tokens"].at[36].set(jnp.nan)
    llm = tiny_llm(CONFIG, params=params, max_batch_size=8, page_size=4)
    clean = [prompt for prompt in PROMPTS.values() if 36 not in prompt][:2]
    right = run(llm, [greedy("a", clean[0], 5), greedy("b", clean[1], 5)])
    for request in (greedy("a", clean[0], 5), greedy("poison", [1, 36, 2], 5), greedy("b", clean[1], 5)):
        llm.engine.submit(request)
    outputs = {}
    while llm.engine.has_work:
        outputs |= {output.request_id: output for output in llm.engine.step() if output.finished}
    assert outputs["poison"].finish_reason == "error"
    assert "not finite" in outputs["poison"].error
    assert outputs["poison"].token_ids == ()
    for name in ("a", "b"):
        assert np.abs(outputs[name].logits - right[name]).max() < 1e-5 * np.abs(right[name]).max()
    assert llm.engine.scheduler.num_reserved_pages == 0
    # Its pages, full of NaN now, serve the next.
    again = run(llm, [greedy(f"n{i}", clean[0], 5) for i in range(4)])
    assert all(np.abs(x - right["a"]).max() < 1e-5 * np.abs(right["a"]).max() for x in again.values())


@pytest.mark.parametrize("moment", ["before the step", "after donation"])
def test_a_step_that_fails_loses_no_request_and_changes_no_token(llm, moment):
    requests = [greedy(name, prompt, 6) for name, prompt in PROMPTS.items()]
    right = run(llm, requests)
    stage = stage_of(llm)
    programs, calls = stage.programs, itertools.count()

    def failing(program):
        def call(*args):
            if next(calls) in (0, 3, 4):
                if moment == "after donation":
                    program(*args)  # the arrays it was given are gone now
                raise RuntimeError("planted")
            return program(*args)

        return call

    stage.programs = {bucket: failing(program) for bucket, program in programs.items()}
    try:
        for request in requests:
            llm.engine.submit(request)
        outputs = {}
        while llm.engine.has_work:
            outputs |= {output.request_id: output for output in llm.engine.step() if output.finished}
    finally:
        stage.programs = programs
    assert next(calls) > 5
    for name, logits in right.items():
        assert outputs[name].token_ids == tuple(logits.argmax(-1).tolist())
        assert outputs[name].finish_reason == "length"
