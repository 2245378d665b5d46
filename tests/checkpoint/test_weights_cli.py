"""`jorca convert` and `jorca inspect`."""

import numpy as np
import pytest
from click.testing import CliRunner

from jorca.checkpoint import load_config, load_params
from jorca.cli import main
from tests.checkpoint.foreign_files import ADDER, DATA, adder_tensors, conv1d, write_hf, write_nanogpt


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args], env={"COLUMNS": "200"})


def lines(text):
    """The lines of a table with single spaces."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


@pytest.fixture
def tiny(tmp_path):
    """A nanoGPT with padding rows."""
    tensors = adder_tensors()
    tensors["transformer.wte.weight"] = np.zeros((16, 48), np.float32)
    del tensors["lm_head.weight"]
    return write_nanogpt(tmp_path / "tiny", tensors, vocab_size=16)


def test_the_layout_is_shown_before_anything_is_converted(tiny, tmp_path):
    result = run(
        "convert", tiny, tmp_path / "out", "--vocab-size", 12, "--eos-token-id", 3, "--dtype", "bfloat16"
    )
    assert result.exit_code == 0, result.output
    shown = lines(result.stdout)
    assert shown[0] == "format nanogpt (ckpt.pt)"
    assert "weights 85,968, float32, 343.9 kB" in shown
    assert "layers 3, width 48, 3 heads, feed-forward width 192, gelu_erf" in shown
    assert "vocabulary 12 tokens and 4 rows of padding; end of text: 3" in shown
    assert "head the embedding" in shown
    assert "scores times 1 / sqrt(head width)" in shown
    assert any(line.startswith("note activation is the exact GELU") for line in shown)
    assert shown[-1] == f"{tmp_path / 'out'}: 85,968, bfloat16, 171.9 kB"
    config = load_config(tmp_path / "out")
    assert (config.vocab_size, config.padded_vocab_size, config.eos_token_id) == (12, 16, 3)


def test_what_does_not_fit_is_shown_and_then_one_error(tmp_path):
    tensors = conv1d(adder_tensors())
    del tensors["transformer.ln_f.bias"]
    source = write_hf(tmp_path / "source", tensors)
    for command in (["convert", source, tmp_path / "out"], ["inspect", source]):
        result = run(*command)
        assert result.exit_code == 1
        assert lines(result.stdout)[0] == "format hf (model.safetensors, config.json)"
        assert result.stderr.splitlines()[-1] == "  missing: ln_f.bias"
        assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_overrides_and_renaming_reach_the_model(tmp_path):
    renames = [r"\.gamma$=.weight", "^num_layers$=n_layer", "^seq_length$=block_size", "^use_bias$=bias"]
    options = [part for rename in renames for part in ("--rename", rename)]
    options += ["--num-heads", 2, "--activation", "gelu_tanh", "--norm-epsilon", "1e-3"]
    result = run("convert", DATA / "nanogpt_byhand", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    config = load_config(tmp_path / "out")
    assert (config.num_heads, config.activation, config.norm_epsilon) == (2, "gelu_tanh", 1e-3)
    assert (config.use_bias, config.vocab_size, config.max_positions) == (False, 32, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rename", "gamma"], "--rename needs PATTERN=REPLACEMENT, got 'gamma'"),
        (["--rename", "(=x"], "rename: '(' to 'x' is no regular expression"),
        (["--format", "gguf"], "format must be one of hf, nanogpt, mingpt, megatron, got 'gguf'"),
        (["--activation", "relu"], "activation must be one of gelu_tanh, gelu_erf, got 'relu'"),
        (["--num-heads", "0"], "num_heads must be an integer of at least 1, got 0"),
        (["--vocab-size", "17"], "vocab_size must be at most the 16 rows"),
    ],
    ids=str,
)
def test_a_wrong_option_is_one_clear_line(tiny, tmp_path, options, message):
    for command in (["convert", tiny, tmp_path / "out"], ["inspect", tiny]):
        result = run(*command, *options)
        assert result.exit_code != 0
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
        assert message in line
    assert not (tmp_path / "out").exists()


def test_a_pattern_may_hold_an_equals_sign(tmp_path):
    tensors = {key.replace("wpe", "a=b"): x for key, x in adder_tensors().items()}
    source = write_nanogpt(tmp_path / "x", tensors)
    assert run("inspect", source, "--rename", "a=b=wpe").exit_code == 0


def test_inspect_describes_a_jorca_checkpoint():
    result = run("inspect", ADDER, "--tensors")
    assert result.exit_code == 0, result.output
    shown = lines(result.stdout)
    assert shown[:2] == ["format jorca", "weights 86,160, float32, 344.6 kB"]
    assert "tokenizer yes" in shown
    assert "head of its own" in shown
    assert "layers.2.attention.out.kernel (3, 16, 48) float32" in shown
    assert len([line for line in shown if line.endswith(" float32")]) == 41


def test_inspect_lists_where_each_weight_comes_from(tiny):
    result = run("inspect", tiny, "--tensors")
    shown = lines(result.stdout)
    assert "layers.0.attention.qkv.kernel h.0.attn.c_attn.weight (48, 3, 3, 16) float32" in shown
    assert len([line for line in shown if line.endswith(" float32")]) == 40


def test_help_names_every_option():
    result = run("convert", "--help")
    for option in ("--format", "--dtype", "--num-heads", "--activation", "--norm-epsilon", "--vocab-size"):
        assert option in result.stdout
    for option in ("--eos-token-id", "--rename PATTERN=REPLACEMENT", "--tokenizer", "--overwrite"):
        assert option in result.stdout


def test_nan_is_warned_of_and_converted(tmp_path, caplog):
    tensors = conv1d(adder_tensors())
    tensors["transformer.ln_f.bias"] = np.full(48, np.nan, np.float32)
    result = run("convert", write_hf(tmp_path / "source", tensors), tmp_path / "out")
    assert result.exit_code == 0
    assert "NaN or infinity in ln_f.bias" in caplog.text
    params = load_params(tmp_path / "out", load_config(tmp_path / "out"))
    assert np.isnan(params["final_norm.bias"]).all()
