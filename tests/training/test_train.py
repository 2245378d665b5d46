"""Whole runs: what they learn, what they read, what an interruption changes (nothing), what comes out."""

import dataclasses
import json
import math
import os
import random
import signal
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from jorca import LLM, SamplingParams
from jorca.checkpoint.store import load_config, load_params
from jorca.cli import main
from jorca.config import ConfigError
from jorca.frontend.text import Tokenizer
from jorca.training import TrainConfig, TrainingError
from jorca.training.data import read_parts
from jorca.training.evaluate import nats_per_byte
from jorca.training.loop import resume, train
from jorca.training.tokenizer import train_tokenizer

CONFIG = TrainConfig(
    vocab_size=262,
    layers=1,
    heads=2,
    width=16,
    context=16,
    batch_size=4,
    steps=14,
    warmup_steps=2,
    learning_rate=0.01,
    eval_every=5,
    checkpoint_every=4,
)
OPTIONS = [
    f"--{name.replace('_', '-')}={value}"
    for name, value in dataclasses.asdict(CONFIG).items()
    if value != getattr(TrainConfig(), name)
]


def coin_flips(num_pairs, seed=0):
    """Text with ln 2 / 2 nats per byte: every other letter is a fair coin."""
    rng = random.Random(seed)
    return "".join("a" + rng.choice("bc") for _ in range(num_pairs))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text"
    file.write_text(coin_flips(1000))
    return file


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run that nothing interrupted: its folder and its losses."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, train(CONFIG, text, out)


def same_model(one, other):
    config = load_config(one)
    assert load_config(other) == config
    a, b = load_params(one, config), load_params(other, config)
    return all(np.array_equal(a[name], b[name]) for name in a)


class Interrupted(Exception):
    pass


def interrupt_after(step):
    def on_step(done, loss):
        if done == step:
            raise Interrupted

    return on_step


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 20))])
def test_a_run_interrupted_at_random_moments_has_the_losses_of_one_that_was_not(seed, text, whole, tmp_path):
    rng = random.Random(seed)
    moments = sorted(rng.choices(range(1, CONFIG.steps + 1), k=4))
    with pytest.raises(Interrupted):
        train(CONFIG, text, tmp_path / "run", on_step=interrupt_after(moments[0]))
    for moment in moments[1:]:
        try:
            resume(text, tmp_path / "run", on_step=interrupt_after(moment))
        except Interrupted:
            continue
    progress = resume(text, tmp_path / "run")
    assert progress == whole[1]
    assert same_model(tmp_path / "run" / "model", whole[0] / "model")


KILLED_WHILE_WRITING = """
    import os, signal, sys
    from pathlib import Path
    from jorca.cli import main

    rename = os.rename
    def killed(source, target, **options):
        if Path(target).name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target, **options)

    os.rename = killed
    main(sys.argv[2:])
"""


@pytest.mark.parametrize("written", ["8", pytest.param("model", marks=pytest.mark.slow)])
def test_a_run_killed_while_it_writes_goes_on_from_what_was_whole(written, text, whole, tmp_path):
    """`written` is what is being put in its place: the state after 8 updates, or the first model."""
    arguments = ["train", "--data", str(text), "--out", str(tmp_path / "run"), *OPTIONS]
    script = textwrap.dedent(KILLED_WHILE_WRITING)
    compiled = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    killed = subprocess.run(
        [sys.executable, "-c", script, written, *arguments], env=os.environ | compiled, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "run" / "state" / "4").is_dir()
    assert not (tmp_path / "run" / "state" / "8").exists()
    assert resume(text, tmp_path / "run") == whole[1]
    assert same_model(tmp_path / "run" / "model", whole[0] / "model")
    names = {file.name for file in (tmp_path / "run").iterdir()}
    assert names == {"run.json", "tokenizer.json", "state", "model", "loss.png"}
    assert [file.name for file in (tmp_path / "run" / "state").iterdir()] == ["14"]


def test_a_run_can_go_on_on_other_devices(text, whole, tmp_path):
    with pytest.raises(Interrupted):
        train(CONFIG, text, tmp_path / "run", on_step=interrupt_after(9))
    progress = resume(text, tmp_path / "run", {"data_parallel": 2, "tensor": 2, "checkpoint_every": 3})
    np.testing.assert_allclose(progress.losses, whole[1].losses, rtol=1e-5)
    assert progress.losses[:8] == whole[1].losses[:8]


def test_a_run_that_has_ended_stays_as_it_is(text, whole):
    assert resume(text, whole[0]) == whole[1]


def test_what_would_change_the_losses_is_refused_when_a_run_is_resumed(text, whole, tmp_path):
    with pytest.raises(ConfigError, match=r"learning_rate must stay 0\.01 .* got 0\.1; leave it out"):
        resume(text, whole[0], {"learning_rate": 0.1})
    with pytest.raises(ConfigError, match="data_parallel must divide batch_size"):
        resume(text, whole[0], {"data_parallel": 3})
    (other := tmp_path / "other").write_text(coin_flips(1000, seed=1))
    with pytest.raises(TrainingError, match="another text"):
        resume(other, whole[0])
    with pytest.raises(TrainingError, match="holds no run"):
        resume(text, tmp_path)


def test_a_damaged_checkpoint_is_named(text, tmp_path):
    with pytest.raises(Interrupted):
        train(CONFIG, text, tmp_path / "run", on_step=interrupt_after(4))
    for file in (tmp_path / "run" / "state" / "4").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(TrainingError, match="state/4: cannot be read"):
        resume(text, tmp_path / "run")


def test_a_folder_with_anything_in_it_is_not_written_to(text, whole, tmp_path):
    with pytest.raises(TrainingError, match="holds a run already; resume it"):
        train(CONFIG, text, whole[0])
    (tmp_path / "mine").write_text("")
    with pytest.raises(TrainingError, match="is in the way"):
        train(CONFIG, text, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_nothing_of_the_test_part_and_nothing_but_the_training_part_s_words_has_an_influence(
    text, whole, tmp_path
):
    content = text.read_text()
    changed = tmp_path / "changed"
    changed.write_text(content[:1600] + content[1600:1800] + "zz" * 100)
    progress = train(CONFIG, changed, tmp_path / "test")
    assert progress == whole[1]
    changed.write_text(content[:1600] + "yz" * 100 + "zz" * 100)
    progress = train(CONFIG, changed, tmp_path / "both")
    assert progress.losses == whole[1].losses
    assert progress.validation != whole[1].validation
    for run in ("test", "both"):
        assert (tmp_path / run / "tokenizer.json").read_bytes() == (whole[0] / "tokenizer.json").read_bytes()


def test_a_model_learns_all_there_is_to_know_and_no_more(tmp_path):
    (text := tmp_path / "text").write_text(coin_flips(5000))
    config = TrainConfig(
        vocab_size=256,
        layers=1,
        heads=2,
        width=64,
        context=8,
        batch_size=16,
        steps=80,
        warmup_steps=5,
        learning_rate=0.005,
        dropout=0,
        eval_every=40,
    )
    progress = train(config, text, tmp_path / "run")
    assert progress.best is not None
    nats = progress.best[1] - math.log(256) / 1000  # the part's first byte costs that, whatever the model
    assert 0.99 * math.log(2) / 2 < nats < 1.05 * math.log(2) / 2


def test_the_model_that_comes_out_is_the_best_one_and_serves(text, whole):
    out, progress = whole
    parts = read_parts(text, 0.1, 0.1)
    config = load_config(out / "model")
    tokens = Tokenizer.from_file(out / "model" / "tokenizer.json").encode(parts.validation.decode())
    nats = nats_per_byte(config, load_params(out / "model", config), tokens, len(parts.validation))
    assert nats == pytest.approx(min(nats for _, nats in progress.validation), rel=1e-6)
    assert [step for step, _ in progress.validation] == [5, 10, 14]
    (output,) = LLM(out / "model", max_batch_size=1, min_bucket=16).generate(
        "ab", SamplingParams(max_tokens=5, seed=0)
    )
    assert len(output.token_ids) == 5


def invoke(*arguments):
    return CliRunner().invoke(main, ["train", *map(str, arguments)])


def test_the_command_trains_shows_losses_and_draws_the_curve(text, whole, tmp_path):
    result = invoke("--data", text, "--out", tmp_path / "run", *OPTIONS, "--save-dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert f"validation {whole[1].validation[0][1]:.4f}" in result.output
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert load_config(tmp_path / "run" / "model").dtype == "bfloat16"
    rounded = load_params(tmp_path / "run" / "model", load_config(tmp_path / "run" / "model"))
    exact = load_params(whole[0] / "model", load_config(whole[0] / "model"))
    for name, weight in exact.items():
        np.testing.assert_array_equal(rounded[name], weight.astype("bfloat16"))


def test_a_missing_matplotlib_costs_the_curve_and_nothing_else(text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("--data", text, "--out", tmp_path / "run", *OPTIONS)
    assert result.exit_code == 0, result.output
    assert "no loss curve: a plot needs matplotlib" in result.output
    assert not (tmp_path / "run" / "loss.png").exists()
    assert (tmp_path / "run" / "model").is_dir()


def test_a_tokenizer_can_be_brought_along(text, tmp_path):
    tokenizer = train_tokenizer("other words " * 9, 262)
    tokenizer.save(str(file := tmp_path / "tokenizer.json"))
    options = [option for option in OPTIONS if not option.startswith("--vocab-size")]
    result = invoke("--data", text, "--out", tmp_path / "run", *options, "--tokenizer", file)
    assert result.exit_code == 0, result.output
    assert load_config(tmp_path / "run" / "model").vocab_size == 262
    assert json.loads((tmp_path / "run" / "tokenizer.json").read_text()) == json.loads(file.read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heads=3"], "heads must divide width"),
        (["--steps=0"], "steps must be an integer of at least 1, got 0"),
        (["--steps=many"], "'many' is not a valid integer"),
        (["--dtype=float16"], "dtype must be one of float32, bfloat16, got 'float16'"),
        (["--vocab-size=100"], "vocab_size must be at least 256"),
        (["--vocab-size=9999"], "vocab_size must be at most"),
        (["--context=4000"], "take a longer text or a smaller context"),
        (["--tensor=5"], "sizes that do: 1, 2"),
        (["--data-parallel=16", "--batch-size=16"], "at most the number of devices, 8"),
        (["--data=nowhere"], "nowhere: cannot be read"),
        (["--resume"], "holds no run that could be resumed"),
        (["--resume", f"--tokenizer={__file__}"], "leave --tokenizer out"),
        ([f"--tokenizer={__file__}"], "leave --vocab-size out"),
        (["--unknown"], "--unknown"),
    ],
)
def test_a_mistake_is_one_clear_error_and_leaves_nothing_behind(options, message, text, tmp_path):
    result = invoke("--data", text, "--out", tmp_path / "run", *OPTIONS, *options)
    assert result.exit_code != 0
    assert [line for line in result.output.splitlines() if "Error" in line and message in line], result.output
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_no_number_ends_the_run(text, tmp_path):
    with pytest.raises(TrainingError, match=r"loss of update .* is (nan|inf); try a smaller learning_rate"):
        train(dataclasses.replace(CONFIG, learning_rate=1e30, clip_norm=1e30), text, tmp_path / "run")
