"""Checkpoints that PyTorch programs wrote, converted, say what those programs say of them.

See tests/golden/make_checkpoints.py.
"""

import dataclasses
import json

import numpy as np
import pytest

from jorca.checkpoint import convert_checkpoint, load_checkpoint, load_params
from tests.checkpoint.foreign_files import DATA, GOLDEN
from tests.model.test_gpt import flat_logits

BOUND = 1e-5
CASES = {
    "hf": {},
    "hf_sharded": {"d_ff": 20, "activation": "gelu_erf", "tie_embeddings": False},
    "hf_bin": {"norm_epsilon": 1e-3, "scale_attention_by_inverse_layer": True},
    "hf_bin_sharded": {"scale_attention": False},
    "hf_bfloat16": {"dtype": "bfloat16"},
    "nanogpt": {"activation": "gelu_erf"},
    "nanogpt_without_bias": {"activation": "gelu_erf", "use_bias": False},
    "nanogpt_padded": {"activation": "gelu_erf", "padded_vocab_size": 64},
    "nanogpt_early": {"activation": "gelu_tanh"},
    "mingpt": {"tie_embeddings": False},
}
"""What differs from a GPT-2 that is like all others here."""
OVERRIDES = {"nanogpt_padded": {"vocab_size": 61}, "nanogpt_early": {"activation": "gelu_tanh"}}


def logits_of(config, params, sequences):
    # Operation by operation: a dozen whole programs would take long to compile.
    return flat_logits(config, params, sequences, "reference", jit=lambda run: run)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "logits.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("case", CASES)
def test_a_converted_checkpoint_says_what_its_own_program_says(case, golden, tmp_path):
    config = convert_checkpoint(GOLDEN / case, tmp_path / "model", **OVERRIDES.get(case, {}))
    common = {"vocab_size": 61, "max_positions": 24, "num_layers": 2, "num_heads": 3, "d_model": 12}
    assert {name: getattr(config, name) for name in common | CASES[case]} == common | CASES[case]
    # The logits of what is stored in bfloat16 are computed in float32.
    params = load_params(tmp_path / "model", config, dtype="float32")
    ids, right = golden[f"{case}/ids"], golden[f"{case}/logits"]
    got = logits_of(dataclasses.replace(config, dtype="float32"), params, [ids.tolist()])
    assert got.shape == right.shape
    assert np.abs(got - right).max() < BOUND * np.abs(right).max()


def test_the_golden_logits_tell_the_activations_of_nanogpt_apart(golden, tmp_path):
    config = convert_checkpoint(GOLDEN / "nanogpt_early", tmp_path / "model")
    assert config.activation == "gelu_erf"
    right = golden["nanogpt_early/logits"]
    got = logits_of(config, load_params(tmp_path / "model", config), [golden["nanogpt_early/ids"].tolist()])
    assert np.abs(got - right).max() > 10 * BOUND * np.abs(right).max()


def test_a_checkpoint_that_calls_everything_otherwise_is_renamed_and_has_its_published_loss(tmp_path):
    rename = [
        (r"\.gamma$", ".weight"),
        ("^num_heads$", "n_head"),
        ("^num_layers$", "n_layer"),
        ("^dim_embedding$", "n_embd"),
        ("^seq_length$", "block_size"),
        ("^use_bias$", "bias"),
    ]
    config = convert_checkpoint(DATA / "nanogpt_byhand", tmp_path / "model", rename=rename)
    assert (config.num_heads, config.use_bias, config.activation) == (2, False, "gelu_erf")
    tokens = np.fromfile(DATA / "nanogpt_byhand/val.bin", np.uint16).astype(int)
    num_windows = (len(tokens) - 1) // 8
    assert num_windows == 42
    inputs = tokens[: 8 * num_windows].reshape(num_windows, 8)
    targets = tokens[1 : 8 * num_windows + 1]
    logits = logits_of(config, load_params(tmp_path / "model", config), inputs.tolist()).astype(np.float64)
    log_sums = np.log(np.exp(logits).sum(axis=1))
    losses = log_sums - logits[np.arange(len(targets)), targets]
    assert losses.mean() == pytest.approx(1.506, abs=5e-4)  # recomputed elsewhere without PyTorch


def test_a_published_tiny_gpt2_is_what_plain_numpy_says_of_its_file():
    """Straight from the file's bytes: neither jorca's reader nor its parameter table is asked."""
    folder = DATA / "hf_tiny_gpt2"
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    w = {}
    for key, entry in header.items():
        if key != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            w[key] = np.frombuffer(data[start:end], "<f4").reshape(entry["shape"]).astype(np.float64)

    def norm(x, name):
        centred = x - x.mean(1, keepdims=True)
        normed = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
        return normed * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    ids = [11, 14, 3, 20, 0, 19, 8]
    x = w["wte.weight"][ids] + w["wpe.weight"][: len(ids)]
    q, k, v = np.split(linear(norm(x, "h.0.ln_1"), "h.0.attn.c_attn"), 3, axis=1)  # one head of width 2
    scores = np.exp(np.where(np.tri(len(ids), dtype=bool), q @ k.T / np.sqrt(2), -np.inf))
    x = x + linear(scores / scores.sum(1, keepdims=True) @ v, "h.0.attn.c_proj")
    up = linear(norm(x, "h.0.ln_2"), "h.0.mlp.c_fc")
    gelu = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    x = norm(x + linear(gelu, "h.0.mlp.c_proj"), "ln_f")
    right = x @ w["wte.weight"].T

    loaded = load_checkpoint(folder)
    assert loaded.config.eos_token_id == 20
    got = logits_of(loaded.config, loaded.params, [ids])
    assert np.abs(got - right).max() < BOUND * np.abs(right).max()
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode(" lower").ids == [14, 15]  # "Ġlow" and "er" by its merges
