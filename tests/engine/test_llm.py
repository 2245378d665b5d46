"""`LLM` on the shipped adder: sums through the public API, and everything a caller may do or get wrong."""

import dataclasses
import itertools
import json
import random
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from click.testing import CliRunner

import jorca
from engine.device import stage_of
from jorca import LLM, JorcaError, RequestRejected, SamplingParams
from jorca.cli import main
from jorca.scheduler import Iteration, replay

ADDER = Path(__file__).parents[2] / "checkpoints" / "adder"
GREEDY = SamplingParams(max_tokens=3, temperature=0)


def load(**options):
    # A short ladder: every bucket takes about a second to compile.
    return LLM(ADDER, **({"min_bucket": 8, "bucket_ratio": 8.0} | options))


@pytest.fixture(scope="module")
def llm():
    llm = load(max_batch_size=8, page_size=2, seed=0)
    yield llm
    assert llm.engine.scheduler.num_reserved_pages == 0
    assert not llm.has_work


def digits(a, b):
    return [a // 10, a % 10, b // 10, b % 10]


def answer(output):
    return int("".join(map(str, output.token_ids[::-1])))


def sums(count, seed):
    rng = random.Random(seed)
    return [(rng.randrange(100), rng.randrange(100)) for _ in range(count)]


def run_at_random_times(llm, pairs, seed):
    """Submits sums while others run, and returns the answers by number."""
    rng, coming, answers = random.Random(seed), list(enumerate(pairs)), {}
    while coming or llm.has_work:
        for number, pair in [coming.pop() for _ in range(min(len(coming), rng.randint(0, 5)))]:
            llm.submit(digits(*pair), GREEDY, request_id=str(number))
        for output in llm.step():
            if output.finished:
                answers[int(output.request_id)] = answer(output)
    return answers


@pytest.mark.parametrize(
    ("max_batch_size", "page_size"),
    [
        pytest.param(*sizes, marks=() if sizes in ((1, 16), (8, 1), (32, 2)) else pytest.mark.slow)
        for sizes in itertools.product((1, 8, 32), (1, 2, 16))
    ],
)
def test_300_sums_are_right_all_at_once_and_at_random_times(max_batch_size, page_size):
    # One bucket of the largest size: it is compiled once, and the ladder is for other tests.
    llm = load(max_batch_size=max_batch_size, page_size=page_size, min_bucket=6 * max_batch_size)
    pairs = sums(150, seed=max_batch_size * page_size)
    outputs = llm.generate([digits(a, b) for a, b in pairs], GREEDY)
    assert [answer(output) for output in outputs] == [a + b for a, b in pairs]
    pairs = sums(150, seed=max_batch_size * page_size + 1)
    assert run_at_random_times(llm, pairs, seed=3) == {i: a + b for i, (a, b) in enumerate(pairs)}
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.num_reserved_pages == 0


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("max_batch_size", [1, 8, 32])
def test_all_10000_sums_are_right_all_at_once_and_at_random_times(max_batch_size, page_size):
    llm = load(max_batch_size=max_batch_size, page_size=page_size)
    pairs = [(a, b) for a in range(100) for b in range(100)]
    outputs = llm.generate([digits(a, b) for a, b in pairs], GREEDY)
    assert [answer(output) for output in outputs] == [a + b for a, b in pairs]
    random.Random(0).shuffle(pairs)
    assert run_at_random_times(llm, pairs, seed=4) == {i: a + b for i, (a, b) in enumerate(pairs)}


def test_logits_are_the_known_ones():
    llm = load(max_batch_size=1, page_size=2, return_logits=True)
    (output,) = llm.generate([8, 5, 5, 0], GREEDY)
    # Recomputed in numpy from the PyTorch file when the checkpoint was taken over.
    known = [3.1923, -1.3719, -6.8311, -3.3251, 7.888, 13.8552, 7.3423, -4.2436, -8.6275, -2.0702]
    np.testing.assert_allclose(output.logits[0], known, atol=1e-3)
    assert output.token_ids == (5, 3, 1)
    assert output.logits.shape == (3, 10)
    # With the exact GELU the sixth would be 13.8554 and the first 3.1921.
    assert abs(output.logits[0][0] - 3.1923) < 1e-4


def test_text_and_token_ids_one_and_many_give_the_same(llm):
    for prompts in ("8550", [8, 5, 5, 0], np.array([8, 5, 5, 0]), ["8550"], [[8, 5, 5, 0]]):
        (output,) = llm.generate(prompts, GREEDY)
        assert (output.text, output.token_ids, output.prompt_ids) == ("531", (5, 3, 1), (8, 5, 5, 0))
        assert output.finish_reason == "length"
    mixed = llm.generate(["8550", [1, 2, 3, 4]], GREEDY)
    assert [output.text for output in mixed] == ["531", "640"]
    assert llm.generate([]) == []


def test_results_come_in_input_order_with_parameters_one_each(llm):
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (3, 1, 2)]
    outputs = llm.generate(["9999", "0000", "5555"], params)
    assert [output.text for output in outputs] == ["891", "0", "01"]


def test_streams_carry_every_token_once_and_join_to_the_whole(llm):
    texts, ids, last = {}, {}, {}
    for output in llm.stream([digits(*pair) for pair in sums(20, seed=5)], GREEDY):
        name = output.request_id
        texts[name] = texts.get(name, "") + output.new_text
        ids[name] = ids.get(name, ()) + output.new_token_ids
        assert output.text == texts[name]
        last[name] = output
    assert len(last) == 20
    for name, output in last.items():
        assert output.finished
        assert (output.text, output.token_ids) == (texts[name], ids[name])


def test_closing_a_stream_aborts_what_is_unfinished(llm):
    stream = llm.stream(["1234"] * 12, GREEDY)
    next(stream)
    stream.close()
    assert llm.engine.scheduler.num_unfinished == 0
    while llm.has_work:
        llm.step()
    assert llm.engine.scheduler.num_reserved_pages == 0


def test_outputs_of_requests_that_were_submitted_before_are_kept_during_generate(llm):
    mine = llm.submit("8550", GREEDY)
    llm.generate("1234", GREEDY)
    kept = []
    while llm.has_work:
        kept += llm.step()
    assert {output.request_id for output in kept} == {mine}
    assert sum((output.new_token_ids for output in kept), ()) == (5, 3, 1)
    assert "".join(output.new_text for output in kept) == kept[-1].text == "531"


def test_a_stop_token_stays_in_the_ids_and_out_of_the_text(llm):
    (output,) = llm.generate("8550", dataclasses.replace(GREEDY, stop_token_ids=[3]))
    assert (output.token_ids, output.text) == ((5, 3), "5")
    assert (output.finish_reason, output.stop_reason) == ("stop", 3)


def test_a_stop_string_may_cross_tokens_and_is_cut(llm):
    (output,) = llm.generate("8550", dataclasses.replace(GREEDY, stop=["31"]))
    assert (output.text, output.token_ids) == ("5", (5, 3, 1))
    assert (output.finish_reason, output.stop_reason) == ("stop", "31")
    (output,) = llm.generate("8550", dataclasses.replace(GREEDY, stop="32"))  # "3" was held back in between
    assert (output.text, output.finish_reason) == ("531", "length")


def test_end_of_text_ends_a_request_unless_it_is_ignored():
    config = dataclasses.replace(jorca.load_config(ADDER), eos_token_id=3)
    params = jorca.load_params(ADDER, config)
    llm = LLM.from_params(config, params, max_batch_size=1, min_bucket=6)
    (output,) = llm.generate([8, 5, 5, 0], GREEDY)
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ((5, 3), "stop", 3)
    (output,) = llm.generate([8, 5, 5, 0], dataclasses.replace(GREEDY, ignore_eos=True))
    assert (output.token_ids, output.finish_reason) == ((5, 3, 1), "length")
    assert output.text == ""  # this one has no tokenizer
    with pytest.raises(RequestRejected, match="no tokenizer"):
        llm.generate("8550")
    with pytest.raises(RequestRejected, match=r"no tokenizer.*stop_token_ids"):
        llm.generate([8, 5, 5, 0], SamplingParams(max_tokens=1, stop="5"))


def test_a_seed_decides_whoever_shares_the_batch(llm):
    params = SamplingParams(max_tokens=3, temperature=5.0, seed=42)
    others = SamplingParams(max_tokens=3, temperature=5.0)
    (alone,) = llm.generate("8550", params)
    for place in (0, 3, 6):
        prompts, each = ["1234"] * 6, [others] * 6
        prompts.insert(place, "8550")
        each.insert(place, params)
        assert llm.generate(prompts, each)[place].token_ids == alone.token_ids
    twice = llm.generate(["8550", "8550"], params)
    assert [output.token_ids for output in twice] == [alone.token_ids] * 2
    assert len({output.token_ids for output in llm.generate(["8550"] * 20, others)}) > 5


def test_unseeded_requests_follow_the_engines_seed():
    params = SamplingParams(max_tokens=3, temperature=5.0)
    first, again, other = (
        [o.token_ids for o in load(max_batch_size=8, page_size=2, seed=s).generate(["8550"] * 8, params)]
        for s in (7, 7, 8)
    )
    assert first == again
    assert first != other


def test_n_samples_come_next_to_each_other_and_the_first_is_the_seeds_own(llm):
    params = SamplingParams(max_tokens=3, temperature=5.0, seed=42)
    outputs = llm.generate(["8550", "1234"], dataclasses.replace(params, n=4))
    assert [output.sample for output in outputs] == [0, 1, 2, 3] * 2
    assert [output.prompt_ids for output in outputs] == [(8, 5, 5, 0)] * 4 + [(1, 2, 3, 4)] * 4
    (alone,) = llm.generate("8550", params)
    assert outputs[0].token_ids == alone.token_ids
    assert len({output.token_ids for output in outputs[:4]}) > 1
    again = llm.generate(["8550"], dataclasses.replace(params, n=4))
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs[:4]]


def test_logprobs_are_those_of_the_logits():
    llm = load(max_batch_size=1, page_size=2, return_logits=True)
    (output,) = llm.generate("8550", dataclasses.replace(GREEDY, logprobs=3))
    exact = output.logits.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    assert output.logprobs is not None
    assert len(output.logprobs) == 3
    for row, token, got in zip(exact, output.token_ids, output.logprobs, strict=True):
        assert got.logprob == pytest.approx(row[token], abs=1e-5)
        assert [i for i, _ in got.top] == np.argsort(-row)[:3].tolist()
        assert [p for _, p in got.top] == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-5)
    (output,) = llm.generate("8550", dataclasses.replace(GREEDY, logprobs=0))
    assert [p.top for p in output.logprobs or ()] == [(), (), ()]
    (output,) = llm.generate("8550", GREEDY)
    assert output.logprobs is None


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "prompt_ids must hold at least one token"),
        ([""], "prompt_ids must hold at least one token"),
        ([[]], "prompt_ids must hold at least one token"),
        ([10], "prompt_ids must be below vocab_size 10, got 10"),
        ([-1], "got -1"),
        ([10**18], r"got 1000000000000000000"),
        ([True], "got True"),
        ([1.5], "got 1.5"),
        ("85x0", "'x'"),
        ([0] * 7, "max_positions is 6"),
        (["8550", 7], "a prompt must be text or a list of token ids, got 7"),
        (7, "prompts must be"),
    ],
    ids=str,
)
def test_bad_prompts_are_refused_before_any_device_work_and_the_next_request_works(llm, prompts, message):
    iterations = []
    leave = llm.engine.observe(lambda iteration, _: iterations.append(iteration))
    with pytest.raises(RequestRejected, match=message):
        llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0))
    leave()
    assert iterations == []
    assert not llm.has_work
    assert llm.generate("8550", GREEDY)[0].text == "531"


def test_one_bad_prompt_refuses_the_whole_call_and_says_which(llm):
    with pytest.raises(RequestRejected, match=r"prompts\[2\]: .*got 99"):
        llm.generate(["8550", "1234", [99]], GREEDY)
    assert not llm.has_work


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "fits"),
    [(4, 3, True), (6, 1, True), (6, 2, False), (7, 1, False), (2, 5, True)],
)
def test_the_last_token_needs_no_position(llm, num_prompt, max_tokens, fits):
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    if fits:
        (output,) = llm.generate([1] * num_prompt, params)
        assert len(output.token_ids) == max_tokens
    else:
        with pytest.raises(RequestRejected, match=r"prompt \+ max_tokens - 1"):
            llm.generate([1] * num_prompt, params)


def test_params_of_the_wrong_number_are_refused(llm):
    with pytest.raises(RequestRejected, match="each of the 2 prompts, got 1"):
        llm.generate(["8550", "1234"], [GREEDY])


def test_submit_takes_one_sequence_and_an_id_only_once(llm):
    with pytest.raises(RequestRejected, match="n must be 1"):
        llm.submit("8550", dataclasses.replace(GREEDY, n=2))
    name = llm.submit("8550", GREEDY, request_id="mine")
    with pytest.raises(RequestRejected, match="'mine' is live"):
        llm.submit("1234", GREEDY, request_id="mine")
    outputs = [output for _ in range(3) for output in llm.step()]
    assert name == "mine"
    assert outputs[-1].text == "531"
    assert llm.abort("mine") is None


def test_abort_ends_a_request_between_steps(llm):
    llm.submit("8550", GREEDY, request_id="gone")
    llm.submit("1234", GREEDY, request_id="stays")
    llm.step()
    output = llm.abort("gone")
    assert (output.finish_reason, output.text) == ("abort", "5")
    rest = []
    while llm.has_work:
        rest += llm.step()
    assert {o.request_id for o in rest} == {"stays"}
    assert rest[-1].text == "640"


def test_unknown_engine_options_are_type_errors():
    with pytest.raises(TypeError, match=r"unknown engine option 'max_bs'.*max_batch_size"):
        LLM(ADDER, max_bs=8)


def test_a_folder_without_a_checkpoint_is_one_clear_error(tmp_path):
    with pytest.raises(JorcaError, match="jorca convert"):
        LLM(tmp_path)


def test_nothing_is_compiled_after_warm_up_with_limits_that_are_no_powers_of_two():
    llm = LLM(ADDER, max_batch_size=5, max_batch_tokens=13, page_size=2, min_bucket=2, bucket_ratio=6)
    compiled = []

    def listen(event: str, duration_secs: float, **_):
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        rng = random.Random(6)
        sizes = set()
        llm.engine.observe(lambda iteration, _: sizes.add(iteration.num_tokens))
        for i in range(100):
            params = SamplingParams(
                max_tokens=rng.randint(1, 3),
                temperature=rng.choice([0, 1.0]),
                top_k=rng.choice([0, 2]),
                top_p=rng.choice([1.0, 0.5]),
                logprobs=rng.choice([None, 2]),
            )
            llm.submit([rng.randrange(10) for _ in range(rng.randint(1, 4))], params, request_id=str(i))
            for _ in range(rng.randint(0, 2)):
                llm.step()
        while llm.has_work:
            llm.step()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(sizes) > 8
    assert compiled == []


def test_a_shape_that_was_not_prepared_raises_instead_of_compiling(llm):
    stage = stage_of(llm)
    (program, *_) = stage.programs.values()
    with pytest.raises(TypeError, match="compiled"):
        program(stage.params, stage.cache, stage.state, None, np.zeros(3, np.int32))


def test_every_shape_the_scheduler_can_emit_has_a_program(llm):
    from jorca.config import BucketConfig
    from jorca.engine.buckets import BucketLadder

    limits = llm.engine.scheduler.limits
    ladder = BucketLadder(limits, BucketConfig(min_bucket=8, bucket_ratio=8.0))
    for num_tokens in range(1, limits.max_batch_tokens + 1):
        assert ladder.bucket_for(num_tokens) in stage_of(llm).programs


def test_a_second_start_finds_its_programs_in_the_compilation_cache(tmp_path):
    old = jax.config.jax_compilation_cache_dir
    counts = {}

    def listen(event: str, **_):
        counts[event] = counts.get(event, 0) + 1

    try:
        options = {"max_batch_size": 1, "min_bucket": 6, "compilation_cache_dir": str(tmp_path)}
        first = LLM(ADDER, **options)
        assert list(tmp_path.iterdir())
        jax.monitoring.register_event_listener(listen)
        second = LLM(ADDER, **options)
        assert counts["/jax/compilation_cache/cache_hits"] >= 1
        assert counts.get("/jax/compilation_cache/cache_misses", 0) == 0
        assert first.generate("8550", GREEDY)[0].text == second.generate("8550", GREEDY)[0].text == "531"
    finally:
        jax.monitoring.unregister_event_listener(listen)
        from jorca.engine.programs import use_compilation_cache

        use_compilation_cache(old)


def test_a_record_of_the_schedulers_calls_replays_to_the_same_iterations(tmp_path):
    path = tmp_path / "run.jsonl"
    with load(max_batch_size=2, page_size=2, record=path, seed=1) as llm:
        seen = []
        llm.engine.observe(lambda iteration, _: seen.append(iteration))
        llm.generate(["8550", "1234", "9999"], GREEDY)
        llm.submit("1111", GREEDY, request_id="gone")
        llm.step()
        llm.abort("gone")
    lines = path.read_text().splitlines()
    scheduler = replay(lines)
    assert not scheduler.has_work
    calls = [json.loads(line) for line in lines]
    assert [
        Iteration.from_dict(c["iteration"]) for c in calls if c["call"] == "plan" and c["iteration"]
    ] == seen
    times = [call["now"] for call in calls[1:]]
    assert times == sorted(times)
    admitted = [
        a[0] for c in calls if c["call"] == "plan" and c["iteration"] for a in c["iteration"]["admitted"]
    ]
    released = [r[0] for c in calls for r in c.get("released", ())]
    assert admitted == ["request-0", "request-1", "request-2", "gone"]
    assert sorted(released) == sorted(admitted)


@pytest.mark.parametrize("name", ["taken", "no/where"])
def test_a_record_that_cannot_be_made_is_refused_before_anything_is_compiled(tmp_path, monkeypatch, name):
    (tmp_path / "taken").write_text("")
    monkeypatch.setattr("jorca.engine.llm.build_engine", None)
    with pytest.raises(JorcaError, match="record must be a file to be made"):
        load(max_batch_size=2, record=tmp_path / name)


def test_generate_refuses_before_jax_is_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "jorca.engine.llm", None)  # whoever imports it fails
    for words, message in (
        (["85x0"], "characters that the tokenizer does not know"),
        (["8550", "--max-tokens", "4"], "max_positions is 6"),
        (["8550", "--max-tokens", "1", "--max-batch-tokens", "3"], "max_batch_tokens is 3"),
        (["10", "--token-ids"], "vocab_size 10"),
    ):
        result = CliRunner().invoke(main, ["generate", str(ADDER), *words])
        assert result.exit_code == 1
        assert message in result.stderr
