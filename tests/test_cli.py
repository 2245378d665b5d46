"""The `jorca` command on the shipped adder."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import jorca
from jorca.cli import main
from jorca.demo import PROMPTS

ADDER = Path(__file__).parents[1] / "checkpoints" / "adder"
SHAKESPEARE = ADDER.with_name("shakespeare")
GREEDY = [
    "--max-tokens",
    "3",
    "--temperature",
    "0",
    "--max-batch-size",
    "1",
    "--page-size",
    "2",
    "--min-bucket",
    "6",
]


@pytest.fixture
def run(tmp_path):
    def run(*args, **more):
        if args[0] == "generate":
            args = (*args, "--compilation-cache-dir", jorca_cache())
        return CliRunner().invoke(main, [str(a) for a in args], **more)

    return run


def jorca_cache():
    """The folder that this test run compiles into (see conftest)."""
    import jax

    return jax.config.jax_compilation_cache_dir


def test_generate_streams_one_answer(run):
    result = run("generate", ADDER, "8550", *GREEDY)
    assert (result.exit_code, result.stdout) == (0, "531\n")


def test_generate_prints_several_answers_with_their_ids(run):
    result = run("generate", ADDER, "8550", *GREEDY, "--prompt-file", "-", input="1234\n9999\n")
    assert result.exit_code == 0
    assert sorted(result.stdout.splitlines()) == ["request-0: 531", "request-1: 640", "request-2: 891"]


def test_generate_as_json_carries_everything_about_a_request(run):
    result = run("generate", ADDER, "8,5,5,0", "--token-ids", "--json", "--logprobs", "2", *GREEDY)
    (line,) = map(json.loads, result.stdout.splitlines())
    assert line["token_ids"] == [5, 3, 1]
    assert (line["text"], line["finish_reason"]) == ("531", "length")
    assert line["metrics"]["num_iterations"] == 3
    assert [len(p["top"]) for p in line["logprobs"]] == [2, 2, 2]


def test_generate_draws_a_timeline(run):
    result = run("generate", ADDER, "8550", "1234", "--timeline", *GREEDY)
    assert "requests in it" in result.stderr
    assert result.stderr.count("length") == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "-1"], "temperature must be a number of at least 0, got -1.0"),
        (["--max-tokens", "0"], "max_tokens must be between 1"),
        (["--token-ids"], "--token-ids needs ids with commas"),
        (["--max-tokens", "9"], "max_positions is 6"),
        (["--page-size", "0"], "page_size must be an integer of at least 1, got 0"),
        (["--attention", "fast"], "attention must be one of"),
    ],
    ids=str,
)
def test_generate_says_in_one_line_what_is_wrong(run, args, message):
    result = run("generate", ADDER, "85x0" if "--token-ids" in args else "8550", *GREEDY, *args)
    assert result.exit_code != 0
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert message in line
    assert "Traceback" not in result.output


def test_the_help_knows_every_attention(run):
    assert "auto, reference, xla, mosaic, triton." in " ".join(run("generate", "--help").stdout.split())


def test_generate_needs_a_prompt_and_a_checkpoint(run, tmp_path):
    assert "give at least one prompt" in run("generate", ADDER).stderr
    assert "is not a jorca checkpoint" in run("generate", tmp_path, "1").stderr


def test_convert_writes_a_checkpoint_that_is_the_shipped_one(run, tmp_path):
    shutil.copytree(ADDER / "source", tmp_path / "source")
    tokenizer = ADDER / "tokenizer.json"
    result = run("convert", tmp_path / "source", tmp_path / "new", "--tokenizer", tokenizer)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith(f"{tmp_path / 'new'}: 86,160, float32, 344.6 kB\n")
    config = jorca.load_config(ADDER)
    assert jorca.load_config(tmp_path / "new") == config
    ours, theirs = jorca.load_params(tmp_path / "new", config), jorca.load_params(ADDER, config)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        np.testing.assert_array_equal(weight, theirs[name])
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    again = run("convert", tmp_path / "source", tmp_path / "new")
    assert again.exit_code == 1
    assert "exists already" in again.stderr


def test_demo_streams_texts_side_by_side_and_gets_every_sum_right(run):
    folders = ("--texts", SHAKESPEARE, "--sums", ADDER)
    cache = ("--compilation-cache-dir", jorca_cache())
    result = run("demo", *folders, "--num-sums", "12", *cache)
    assert result.exit_code == 0, result.output
    texts, _, sums = result.stdout.partition("12 sums")
    for prompt, max_tokens in PROMPTS.items():
        assert prompt.partition("\n")[0] in texts
        assert re.search(rf"■ +{max_tokens} tokens", texts)
    assert "156 tokens at" in texts
    assert "12 of 12 right" in sums
    assert sums.count("✓") == 12
    assert texts.count("requests in it") == sums.count("requests in it") == 1


def test_the_demo_is_for_meshes_too(run):
    result = run("demo", "--texts", SHAKESPEARE, "--sums", ADDER, "--stages", "5")
    assert result.exit_code == 1
    assert "stages must be at most the model's 4 layers, got 5" in result.stderr


def test_generate_takes_what_changes_logits(run):
    result = run("generate", ADDER, "8550", *GREEDY, "--logit-bias", "5=-100", "--logit-bias", "4=100")
    assert result.stdout == "444\n"
    result = run("generate", ADDER, "8550", *GREEDY, "--logit-bias", "5")
    assert "--logit-bias needs ID=VALUE, got '5'" in result.stderr


def test_doctor_says_what_runs_and_that_it_is_right(run):
    result = run("doctor")
    assert result.exit_code == 0, result.output
    for word in ("jax", "orbax-checkpoint", "device 0", "xla: made for CPUs", "self-check xla float16"):
        assert word in result.stdout
    assert result.stdout.count(", ok") == 9


def test_doctor_fails_if_attention_is_wrong(run, monkeypatch):
    from jorca.attention import selfcheck

    monkeypatch.setattr(selfcheck, "_difference", lambda *_: float("inf"))
    result = run("doctor")
    assert result.exit_code == 1
    assert "off by inf" in result.stdout
