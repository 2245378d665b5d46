"""Writes checkpoints in Megatron-LM's layout, from jorca's parameters or from any tree, without Megatron."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jorca.config import ModelConfig
from tests.checkpoint import torch_files as tf

Rename = Callable[[str], str]


def save(path: Path, saved: Any) -> Path:
    """Writes one rank's file, whose `args` may be a Namespace."""
    storages: dict[str, bytes] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(saved, dict) or not isinstance(saved.get("args"), argparse.Namespace):
        return tf.save(path, saved)
    program = tf.encode({key: value for key, value in saved.items() if key != "args"}, storages)
    namespace = tf.name("argparse", "Namespace") + b")\x81" + tf.encode(vars(saved["args"]), storages) + b"b"
    return tf.write(path, program + tf.text("args") + namespace + b"s", storages)


def rank_folder(tensor_rank: int, stage: int, pp: int) -> str:
    return f"mp_rank_{tensor_rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")


def fused_rows(x_3nh: np.ndarray, version: float) -> np.ndarray:
    """Returns one rank's [3, heads, width, ...] in the row order of a version, [3 * heads * width, ...]."""
    order = {0: "cnh...->cnh...", 1: "cnh...->nhc..."}.get(int(version), "cnh...->nch...")
    return np.einsum(order, x_3nh).reshape(-1, *x_3nh.shape[3:])


def shard(
    config: ModelConfig, params: dict[str, np.ndarray], *, tp: int, version: float
) -> list[dict[str, np.ndarray]]:
    """Returns each tensor rank's tensors by the names of 2022, with all layers."""
    d = config.d_model
    ranks: list[dict[str, np.ndarray]] = [{} for _ in range(tp)]

    def put(name: str, whole: np.ndarray, axis: int | None = None) -> None:
        parts = [whole] * tp if axis is None else np.split(whole, tp, axis)
        for rank, part in zip(ranks, parts, strict=True):
            rank[name] = part

    put("embedding.word_embeddings.weight", params["embed.tokens"], 0)
    put("embedding.position_embeddings.weight", params["embed.positions"])
    for i in range(config.num_layers):
        at, to = f"layers.{i}.", f"layers.{i}."
        for name, module in (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
            put(f"{to}{module}.weight", params[f"{at}{name}.scale"])
            put(f"{to}{module}.bias", params[f"{at}{name}.bias"])
        kernel = np.moveaxis(params[f"{at}attention.qkv.kernel"], 0, -1)
        for leaf, fused in (("weight", kernel), ("bias", params[f"{at}attention.qkv.bias"])):
            for rank, part in zip(ranks, np.split(fused, tp, axis=1), strict=True):
                rank[f"{to}self_attention.query_key_value.{leaf}"] = fused_rows(part, version)
        put(f"{to}self_attention.dense.weight", params[f"{at}attention.out.kernel"].reshape(d, d).T, 1)
        put(f"{to}self_attention.dense.bias", params[f"{at}attention.out.bias"])
        put(f"{to}mlp.dense_h_to_4h.weight", params[f"{at}mlp.up.kernel"].T, 0)
        put(f"{to}mlp.dense_h_to_4h.bias", params[f"{at}mlp.up.bias"], 0)
        put(f"{to}mlp.dense_4h_to_h.weight", params[f"{at}mlp.down.kernel"].T, 1)
        put(f"{to}mlp.dense_4h_to_h.bias", params[f"{at}mlp.down.bias"])
    put("final_layernorm.weight", params["final_norm.scale"])
    put("final_layernorm.bias", params["final_norm.bias"])
    if not config.tie_embeddings:
        put("output_layer.weight", params["head.kernel"], 0)
    return ranks


def stage_of(
    tensors: dict[str, np.ndarray], layers: range, *, first: bool, last: bool, tied: bool
) -> dict[str, np.ndarray]:
    """Returns what one stage holds of a tensor rank's tensors, its layers numbered from 0."""
    stage = {}
    for name, x in tensors.items():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            if int(number) in layers:
                stage[f"layers.{int(number) - layers.start}.{rest}"] = x
        elif first if name.startswith("embedding.") else last:
            stage[name] = x
    if last and not first and tied:
        stage["word_embeddings_for_head.weight"] = tensors["embedding.word_embeddings.weight"]
    return stage


def legacy_tree(
    tensors: dict[str, np.ndarray], block: str = "encoder", rename: Rename = str
) -> dict[str, Any]:
    """Returns a stage's tensors nested as Megatron-LM's own models save them."""
    language: dict[str, Any] = {}
    tree: dict[str, Any] = {"language_model": language}
    for name, x in tensors.items():
        match name.split("."):
            case ["embedding", table, leaf]:
                language.setdefault("embedding", {})[table] = {leaf: x}
            case ["output_layer", leaf]:
                language["output_layer"] = {leaf: x}
            case ["word_embeddings_for_head", leaf]:
                tree["word_embeddings_for_head"] = {leaf: x}
            case _:
                language.setdefault(block, {})[rename(name)] = x
    return tree


def core_tree(tensors: dict[str, np.ndarray], rename: Rename) -> dict[str, Any]:
    """Returns a stage's tensors by Megatron-core's flat names."""
    tree = {}
    for name, x in tensors.items():
        if name.startswith(("layers.", "final_layernorm.")):
            tree[f"decoder.{rename(name)}"] = x
        else:
            tree[name.replace("word_embeddings_for_head", "output_layer")] = x
    return tree


def arguments(config: ModelConfig, *, tp: int, pp: int, **more: Any) -> argparse.Namespace:
    """Returns what Megatron-LM records of a run that trained `config`."""
    return argparse.Namespace(
        **{
            "num_layers": config.num_layers,
            "hidden_size": config.d_model,
            "num_attention_heads": config.num_heads,
            "ffn_hidden_size": config.d_ff,
            "kv_channels": config.head_dim,
            "max_position_embeddings": config.max_positions,
            "padded_vocab_size": config.padded_vocab_size,
            "layernorm_epsilon": config.norm_epsilon,
            "bias_gelu_fusion": config.activation == "gelu_tanh",
            "openai_gelu": False,
            "untie_embeddings_and_output_weights": not config.tie_embeddings,
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "add_bias_linear": True,
            "swiglu": False,
            "num_experts": None,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "lr": 1.5e-4,
        }
        | more
    )


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    params: dict[str, np.ndarray],
    *,
    tp: int = 1,
    pp: int = 1,
    version: float | None = 3.0,
    tree: Callable[[dict[str, np.ndarray]], dict[str, Any]] = legacy_tree,
    edit: Callable[[dict[str, Any], int, int], None] = lambda saved, tensor_rank, stage: None,
    file: str = "model_optim_rng.pt",
) -> Path:
    """Writes every rank's file; `edit` may change what a rank saves. Layers are spread about evenly."""
    bounds = np.linspace(0, config.num_layers, pp + 1).round().astype(int).tolist()
    for tensor_rank, tensors in enumerate(shard(config, params, tp=tp, version=version or 0)):
        for stage in range(pp):
            layers = range(bounds[stage], bounds[stage + 1])
            part = stage_of(
                tensors, layers, first=stage == 0, last=stage == pp - 1, tied=config.tie_embeddings
            )
            saved: dict[str, Any] = {"args": arguments(config, tp=tp, pp=pp), "iteration": 1000}
            if version is not None:
                saved["checkpoint_version"] = version
            saved["model"] = tree(part)
            edit(saved, tensor_rank, stage)
            save(folder / rank_folder(tensor_rank, stage, pp) / file, saved)
    return folder
