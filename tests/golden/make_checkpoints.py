"""Makes checkpoints/: tiny random checkpoints as other programs write them, and the logits of their models.

Run once; the tests read only the files, and neither torch nor transformers is needed for them:

    python3 -m venv golden
    golden/bin/pip install torch==2.13.0 transformers==5.24.0 numpy==2.4.6
    golden/bin/python tests/golden/make_checkpoints.py

The versions named above made the files (CPU, float32 unless a case says otherwise). Hugging Face's are
GPT2LMHeadModel's own, saved by `save_pretrained` or, for pytorch_model.bin, by `torch.save`. For nanoGPT and
minGPT stands `GPT` below, written for this from what both are known to compute and how they name and save
it. Weights come from a fixed numpy seed, every one of them random. Layout:

    <case>/             the checkpoint, as its program leaves it
    logits.npz          <case>/ids int32 [T], and <case>/logits float32 [T, V]
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F  # pyright: ignore[reportMissingImports]

SEED = 20220712
VOCAB, POSITIONS, WIDTH, LAYERS, HEADS = 61, 24, 12, 2, 3
HERE = Path(__file__).with_name("checkpoints")

HF_CASES: dict[str, dict[str, Any]] = {
    "hf": {},
    "hf_sharded": {"n_inner": 20, "activation_function": "gelu", "tie_word_embeddings": False},
    "hf_bin": {"layer_norm_epsilon": 1e-3, "scale_attn_by_inverse_layer_idx": True},
    "hf_bin_sharded": {"scale_attn_weights": False, "reorder_and_upcast_attn": True},
    "hf_bfloat16": {},
}
"""Changes to GPT2Config."""

GPT_CASES: dict[str, dict[str, Any]] = {
    "nanogpt": {},
    "nanogpt_without_bias": {"bias": False, "compiled": True},
    "nanogpt_padded": {"vocab_size": 64, "used": 61},
    "nanogpt_early": {"tanh": True, "mask": True},
    "mingpt": {"tanh": True, "mask": True, "tied": False},
}
"""How models differ from nanoGPT's; `used` is how many of the ids are tokens."""


class Norm(nn.Module):
    """LayerNorm with an optional bias."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Any) -> Any:
        """Normalises the last axis."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    """Causal attention, fused by PyTorch or with a stored mask."""

    def __init__(self, bias: bool, mask: bool):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        if mask:
            self.register_buffer("bias", torch.ones(POSITIONS, POSITIONS).tril()[None, None])

    def forward(self, x: Any) -> Any:
        """Attends within one sequence [1, T, D]."""
        length = x.shape[1]
        q, k, v = (
            y.view(1, length, HEADS, WIDTH // HEADS).transpose(1, 2) for y in self.c_attn(x).split(WIDTH, 2)
        )
        if hasattr(self, "bias"):
            scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
            scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, -math.inf)
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(1, length, WIDTH))


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, bias: bool, tanh: bool):
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH, bias=bias)
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH, bias=bias)
        self.tanh = tanh

    def forward(self, x: Any) -> Any:
        """Maps each row."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh" if self.tanh else "none"))


class Block(nn.Module):
    """One layer."""

    def __init__(self, bias: bool, tanh: bool, mask: bool):
        super().__init__()
        self.ln_1, self.attn = Norm(WIDTH, bias), Attention(bias, mask)
        self.ln_2, self.mlp = Norm(WIDTH, bias), FeedForward(bias, tanh)

    def forward(self, x: Any) -> Any:
        """Adds attention and feed-forward part to the residual stream."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """nanoGPT's model, or minGPT's with `tanh`, `mask` and not `tied`."""

    def __init__(
        self,
        vocab_size: int = VOCAB,
        bias: bool = True,
        tanh: bool = False,
        mask: bool = False,
        tied: bool = True,
    ):
        super().__init__()
        parts = {
            "wte": nn.Embedding(vocab_size, WIDTH),
            "wpe": nn.Embedding(POSITIONS, WIDTH),
            "h": nn.ModuleList(Block(bias, tanh, mask) for _ in range(LAYERS)),
            "ln_f": Norm(WIDTH, bias),
        }
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(WIDTH, vocab_size, bias=False)
        if tied:
            self.lm_head.weight = parts["wte"].weight

    def forward(self, ids: Any) -> Any:
        """Returns the logits [1, T, V] of token ids [1, T]."""
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def main() -> None:
    """Writes the folder beside this script."""
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    rng = np.random.default_rng(SEED)
    arrays: dict[str, Any] = {}
    for name, changes in HF_CASES.items():
        arrays |= logits(name, hugging_face(name, changes, rng), VOCAB, rng)
    for name, changes in GPT_CASES.items():
        arrays |= logits(name, gpt(name, dict(changes), rng), changes.get("used", VOCAB), rng)
    np.savez_compressed(HERE / "logits.npz", **arrays)
    size = sum(file.stat().st_size for file in HERE.rglob("*") if file.is_file())
    print(f"{size:,} bytes; torch {torch.__version__}, transformers {transformers.__version__}")


def randomise(model: Any, rng: np.random.Generator) -> None:
    """Fills every weight so that all show in the logits."""
    for name, weight in model.named_parameters():  # a tied head comes once
        layer, kind = name.split(".")[-2:]
        if layer.startswith("ln_") and kind == "weight":
            value = rng.uniform(0.5, 1.5, weight.shape)
        elif layer.startswith("c_") and kind == "weight":
            value = rng.normal(0, WIDTH**-0.5, weight.shape)
        else:
            value = rng.normal(0, 0.3 if kind == "bias" else 0.1, weight.shape)
        weight.data = torch.tensor(value, dtype=torch.float32)


def logits(name: str, model: Any, num_tokens: int, rng: np.random.Generator) -> dict[str, Any]:
    """Returns a sequence that fills the context, and what the model says of it."""
    ids = rng.integers(0, num_tokens, POSITIONS, dtype=np.int32)
    with torch.inference_mode():
        result = model(torch.tensor(ids[None], dtype=torch.long))
    result = getattr(result, "logits", result)[0].float().numpy()[:, :num_tokens]
    return {f"{name}/ids": ids, f"{name}/logits": result}


def hugging_face(name: str, changes: dict[str, Any], rng: np.random.Generator) -> Any:
    """Saves a GPT2LMHeadModel and returns it, in float32 whatever is stored."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=POSITIONS,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=60,
        eos_token_id=60,
        attn_implementation="eager",
        **changes,
    )
    model = transformers.GPT2LMHeadModel(config).float().eval()
    randomise(model, rng)
    model.tie_weights()
    folder = HERE / name
    if name == "hf_bfloat16":
        model = model.bfloat16()
    if not name.startswith("hf_bin"):
        model.save_pretrained(folder, max_shard_size="8KB" if name == "hf_sharded" else "1GB")
        return model.float()
    config.save_pretrained(folder)
    state = model.state_dict()
    if name == "hf_bin":
        # The bare model, with the masks that older versions stored.
        state = {key.removeprefix("transformer."): x for key, x in state.items() if key != "lm_head.weight"}
        for i in range(LAYERS):
            mask = torch.ones(POSITIONS, POSITIONS).tril().bool()[None, None]
            state |= {f"h.{i}.attn.bias": mask, f"h.{i}.attn.masked_bias": torch.tensor(-1e4)}
        torch.save(state, folder / "pytorch_model.bin")
        return model
    halves = (list(state)[::2], list(state)[1::2])
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    for i, keys in enumerate(halves, start=1):
        file = f"pytorch_model-{i:05d}-of-00002.bin"
        torch.save({key: state[key].clone() for key in keys}, folder / file)
        index["weight_map"] |= dict.fromkeys(keys, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return model


def gpt(name: str, changes: dict[str, Any], rng: np.random.Generator) -> Any:
    """Saves a GPT as nanoGPT's or minGPT's scripts do, and returns it."""
    compiled, _ = changes.pop("compiled", False), changes.pop("used", None)
    model = GPT(**changes).eval()
    randomise(model, rng)
    (HERE / name).mkdir()
    if name == "mingpt":
        torch.save(model.state_dict(), HERE / name / "model.pt")
        fields = {"model_type": None, "n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH}
        fields |= {"vocab_size": VOCAB, "block_size": POSITIONS, "attn_pdrop": 0.1}
        (HERE / name / "config.json").write_text(json.dumps({"model": fields}, indent=4) + "\n")
        return model
    state = (torch.compile(model) if compiled else model).state_dict()  # which compiles nothing yet
    arguments: dict[str, Any] = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": POSITIONS}
    arguments |= {"vocab_size": changes.get("vocab_size", VOCAB), "dropout": 0.0}
    if name != "nanogpt_early":  # which had no such option
        arguments["bias"] = changes.get("bias", True)
    optimizer = torch.optim.AdamW(model.parameters())
    saved = {"model": state, "optimizer": optimizer.state_dict(), "model_args": arguments, "iter_num": 7}
    saved |= {"best_val_loss": torch.tensor(1.5), "config": {"out_dir": "out", "device": "cpu"}}
    torch.save(saved, HERE / name / "ckpt.pt")
    return model


if __name__ == "__main__":
    main()
