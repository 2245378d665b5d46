"""Checkpoints of other programs, made of the adder's tensors or of any, to convert and to spoil."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jorca.checkpoint.pytorch import read_pytorch
from tests.checkpoint import torch_files as tf

ROOT = Path(__file__).parents[2]
ADDER = ROOT / "checkpoints/adder"
DATA = ROOT / "tests/data"
GOLDEN = ROOT / "tests/golden/checkpoints"

HF_CONFIG = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_embd": 48,
    "n_head": 3,
    "n_inner": None,
    "n_layer": 3,
    "n_positions": 6,
    "vocab_size": 10,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
NANOGPT_ARGS = {
    "n_layer": 3,
    "n_head": 3,
    "n_embd": 48,
    "block_size": 6,
    "bias": True,
    "vocab_size": 10,
    "dropout": 0.0,
}


def adder_tensors(*, prefix: str = "transformer.") -> dict[str, np.ndarray]:
    """The adder's tensors by GPT-2's names, linear layers [out, in], without masks."""
    tensors = read_pytorch(ADDER / "source/model.pt")
    return {
        key.replace("transformer.", prefix, 1): np.array(x)
        for key, x in tensors.items()
        if not key.endswith(".attn.bias")
    }


def is_linear(key: str) -> bool:
    return key.endswith(".weight") and key.split(".")[-2].startswith("c_")


def conv1d(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same with linear layers [in, out], as Hugging Face stores them."""
    return {key: np.ascontiguousarray(x.T) if is_linear(key) else x for key, x in tensors.items()}


def write_hf(
    folder: Path,
    tensors: dict[str, Any],
    *,
    shards: list[list[str]] | None = None,
    kind="safetensors",
    **config: Any,
) -> Path:
    """Writes a Hugging Face folder, in shards if lists of names are given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | config))
    write = save_file if kind == "safetensors" else (lambda part, path: tf.save(path, part))
    stem, suffix = ("model", ".safetensors") if kind == "safetensors" else ("pytorch_model", ".bin")
    if shards is None:
        write(tensors, folder / f"{stem}{suffix}")
        return folder
    weight_map = {}
    for i, keys in enumerate(shards, start=1):
        file = f"{stem}-{i:05d}-of-{len(shards):05d}{suffix}"
        write({key: tensors[key] for key in keys}, folder / file)
        weight_map |= dict.fromkeys(keys, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    return folder


def write_nanogpt(folder: Path, tensors: dict[str, Any], **arguments: Any) -> Path:
    """Writes a nanoGPT folder; an argument that is None is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    model_args = {key: x for key, x in (NANOGPT_ARGS | arguments).items() if x is not None}
    tf.save(
        folder / "ckpt.pt",
        {"model": tensors, "optimizer": {"state": {}}, "model_args": model_args, "iter_num": 3, "config": {}},
    )
    return folder


def write_mingpt(folder: Path, tensors: dict[str, Any], **fields: Any) -> Path:
    """Writes a minGPT folder with the adder's config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tf.save(folder / "model.pt", tensors)
    config = json.loads((ADDER / "source/config.json").read_text())
    config["model"].update(fields)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
