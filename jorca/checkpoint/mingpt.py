"""minGPT: key names, model types and `convert_mingpt`.

Facts of the format: linear layers are `nn.Linear`, so kernels lie [out, in]; `attn.c_attn` stacks
queries, keys and values in this order; GELU is the tanh form; the head is a weight of its own; all layers
have biases; `attn.bias` is the causal mask and not a weight.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Final

from jorca.checkpoint.convert import Source, apply_table, cast, common_dtype, strip_prefixes, transpose
from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.pytorch import read_pytorch
from jorca.checkpoint.store import save_checkpoint
from jorca.config import Activation, Dtype, ModelConfig

MODEL_TYPES: Final[dict[str, tuple[int, int, int]]] = {
    "openai-gpt": (12, 12, 768),
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
    "gopher-44m": (8, 16, 512),
    "gpt-mini": (6, 6, 192),
    "gpt-micro": (4, 4, 128),
    "gpt-nano": (3, 3, 48),
}
"""minGPT's named sizes: layers, heads, width."""


def mingpt_table(config: ModelConfig) -> dict[str, Source]:
    """Returns where every parameter of `config` lies in a minGPT state dict."""
    d, f = config.d_model, config.d_ff
    assert f is not None  # set by ModelConfig
    table = {
        "embed.tokens": Source("transformer.wte.weight", (config.vocab_size, d)),
        "embed.positions": Source("transformer.wpe.weight", (config.max_positions, d)),
        "final_norm.scale": Source("transformer.ln_f.weight", (d,)),
        "final_norm.bias": Source("transformer.ln_f.bias", (d,)),
        "head.kernel": Source("lm_head.weight", (config.vocab_size, d)),
    }
    for i in range(config.num_layers):
        for name, module in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            table[f"layers.{i}.{name}.scale"] = Source(f"transformer.h.{i}.{module}.weight", (d,))
            table[f"layers.{i}.{name}.bias"] = Source(f"transformer.h.{i}.{module}.bias", (d,))
        for name, module, num_out, num_in in (
            ("attention.qkv", "attn.c_attn", 3 * d, d),
            ("attention.out", "attn.c_proj", d, d),
            ("mlp.up", "mlp.c_fc", f, d),
            ("mlp.down", "mlp.c_proj", d, f),
        ):
            weight, bias = f"transformer.h.{i}.{module}.weight", f"transformer.h.{i}.{module}.bias"
            table[f"layers.{i}.{name}.kernel"] = Source(weight, (num_out, num_in), transpose)
            table[f"layers.{i}.{name}.bias"] = Source(bias, (num_out,))
    return table


def convert_mingpt(
    src: str | Path,
    dst: str | Path,
    *,
    num_heads: int | None = None,
    activation: Activation = "gelu_tanh",
    norm_epsilon: float = 1e-5,
    dtype: Dtype | None = None,
    eos_token_id: int | None = None,
    tokenizer_file: str | Path | None = None,
    overwrite: bool = False,
) -> ModelConfig:
    """Converts a minGPT checkpoint into a jorca checkpoint.

    Args:
      src: The state dict that minGPT saved, or its folder: `model.pt` with `config.json`. The config is read
        when it lies beside the file; sizes come from the tensors and must agree with it.
      dst: The folder to write.
      num_heads: Attention heads, which no tensor tells. None reads them from the config; a number stands
        above the config.
      activation: "gelu_tanh" is minGPT's own; another for a model that was changed.
      norm_epsilon: 1e-5 is minGPT's own; another for a model that was changed.
      dtype: What to store. None keeps the tensors' dtype, which must then be one and the same.
      eos_token_id: The end-of-text token, which minGPT does not record.
      tokenizer_file: A `tokenizer.json` to put beside the weights.
      overwrite: Whether an existing `dst` is replaced.

    Returns:
      The model's config.

    Raises:
      CheckpointError: The source is unreadable or is no whole minGPT, or `dst` exists.
    """
    src = Path(src)
    file = src / "model.pt" if src.is_dir() else src
    tensors = read_pytorch(file)
    if not isinstance(tensors, dict) or not all(isinstance(key, str) for key in tensors):
        raise CheckpointError(f"{file}: holds no state dict (a dict of tensors by name)")
    recorded = _read_config(file.with_name("config.json"))
    num_heads = recorded.get("n_head") if num_heads is None else num_heads
    if num_heads is None:
        raise CheckpointError(
            f"{file}: no tensor tells the number of heads; give num_heads, or put minGPT's config.json by it"
        )
    try:
        tensors = strip_prefixes(tensors)
        sizes = _sizes(tensors)
        _check_sizes(sizes, recorded)
        config = ModelConfig(
            **sizes,
            num_heads=num_heads,
            activation=activation,
            norm_epsilon=norm_epsilon,
            tie_embeddings=False,
            eos_token_id=eos_token_id,
        )
        masks = {f"transformer.h.{i}.attn.bias" for i in range(config.num_layers)}
        params = apply_table(tensors, mingpt_table(config), config, ignored=masks)
        config = dataclasses.replace(config, dtype=common_dtype(params) if dtype is None else dtype)
        params = cast(params, config.dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    save_checkpoint(dst, config, params, tokenizer_file=tokenizer_file, overwrite=overwrite)
    return config


def _sizes(tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns what the shapes tell, as fields of `ModelConfig`."""
    shapes: dict[str, tuple[int, ...]] = {key: getattr(x, "shape", ()) for key, x in tensors.items()}
    layers = {match[1] for key in tensors if (match := re.match(r"transformer\.h\.(\d+)\.", key))}
    for key in ("transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.mlp.c_fc.weight"):
        if len(shapes.get(key, ())) != 2 or 0 in shapes[key]:
            raise CheckpointError(f"is not a minGPT state dict: it needs a matrix {key!r}")
    vocab_size, d_model = shapes["transformer.wte.weight"]
    return {
        "vocab_size": vocab_size,
        "max_positions": shapes["transformer.wpe.weight"][0],
        "num_layers": len(layers),
        "d_model": d_model,
        "d_ff": shapes["transformer.h.0.mlp.c_fc.weight"][0],
    }


def _read_config(path: Path) -> dict[str, Any]:
    """Returns the model part of minGPT's config.json with its model type spelled out; {} if none is there."""
    if not path.exists():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields = {key: value for key, value in fields.get("model", fields).items() if value is not None}
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not minGPT's config.json ({error})") from error
    model_type = fields.pop("model_type", None)
    if model_type is None:
        return fields
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"{path}: model_type must be one of {', '.join(MODEL_TYPES)}, got {model_type!r}"
        )
    named = dict(zip(("n_layer", "n_head", "n_embd"), MODEL_TYPES[model_type], strict=True))
    for key, value in named.items():
        if fields.setdefault(key, value) != value:
            raise CheckpointError(
                f"{path}: model_type {model_type!r} has {key} {value}, but {key} is {fields[key]}"
            )
    return fields


def _check_sizes(sizes: dict[str, Any], recorded: dict[str, Any]) -> None:
    """Raises if the config speaks of another model than the tensors."""
    for key, name in (
        ("n_layer", "num_layers"),
        ("n_embd", "d_model"),
        ("vocab_size", "vocab_size"),
        ("block_size", "max_positions"),
    ):
        if recorded.get(key, sizes[name]) != sizes[name]:
            raise CheckpointError(
                f"config.json says {key} {recorded[key]}, but the tensors have {sizes[name]}"
            )
