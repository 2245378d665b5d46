"""The way back: a jorca checkpoint as a folder that Hugging Face's `transformers` loads.

    config.json             GPT2LMHeadModel with all flags
    model.safetensors       the weights, in the dtype they have
    tokenizer.json          if the checkpoint has a tokenizer
    tokenizer_config.json   likewise

Two things GPT-2 cannot say there. Linear layers and norms always have biases: a model without gets zeros,
which add nothing. Rows of the vocabulary's padding would count as tokens: they are left out.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.gpt2 import gpt2_table
from jorca.checkpoint.store import (
    TOKENIZER_FILE,
    check_destination,
    load_config,
    load_params,
    new_folder,
)
from jorca.checkpoint.tokenizer_files import tokenizer_json
from jorca.config import Activation, ModelConfig
from jorca.model.params import param_table

_ACTIVATIONS: Final[dict[Activation, str]] = {"gelu_tanh": "gelu_new", "gelu_erf": "gelu"}


def export_hf(src: str | Path, dst: str | Path) -> tuple[str, ...]:
    """Writes a jorca checkpoint as a GPT-2 of Hugging Face's `transformers`, wholly or not at all.

    Converting the folder back gives the same model, bit for bit but for what the notes say.

    Args:
      src: The jorca checkpoint.
      dst: The folder to make; its parent must exist.

    Returns:
      Notes on what is different there, none if nothing is.

    Raises:
      CheckpointError: `src` is no whole jorca checkpoint, or something is in the way at `dst`.
    """
    if Path(dst).exists():
        raise CheckpointError(f"{dst}: exists already; choose another path")
    src, dst = Path(src), check_destination(dst, overwrite=False)
    config = load_config(src)
    tokenizer = tokenizer_json(src / TOKENIZER_FILE) if (src / TOKENIZER_FILE).exists() else None
    cpu = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    params = load_params(src, config, shardings=dict.fromkeys(param_table(config), cpu))
    with new_folder(dst) as partial:
        save_file(_tensors(config, params), partial / "model.safetensors", metadata={"format": "pt"})
        _write_json(partial / "config.json", _hf_config(config))
        shutil.copymode(partial / "config.json", partial / "model.safetensors")  # the library's is private
        if tokenizer is not None:
            (partial / TOKENIZER_FILE).write_text(tokenizer, encoding="utf-8")
            _write_json(partial / "tokenizer_config.json", _tokenizer_config(config, tokenizer))
    return _notes(config)


def _tensors(config: ModelConfig, params: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Returns the weights by GPT-2's names: views of the parameters' own memory, and zeros for biases."""
    there = dataclasses.replace(config, use_bias=True, padded_vocab_size=config.vocab_size)
    tensors: dict[str, np.ndarray] = {}
    for name, source in gpt2_table(there, out_in=False).items():
        key = source.key if name == "head.kernel" else f"transformer.{source.key}"
        if name not in params:
            x = np.zeros(source.shape, config.dtype)
        elif name in ("embed.tokens", "head.kernel"):
            x = np.asarray(params[name])[: config.vocab_size]
        else:
            x = np.asarray(params[name]).reshape(source.shape)
        tensors[key] = np.ascontiguousarray(x)  # which it is; the library writes memory as it lies
    return tensors


def _hf_config(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of a `GPT2Config`; whatever defaults to something else than here is named."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_positions,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_embd": config.d_model,
        "n_inner": config.d_ff,
        "activation_function": _ACTIVATIONS[config.activation],
        "layer_norm_epsilon": config.norm_epsilon,
        "scale_attn_weights": config.scale_attention,
        "scale_attn_by_inverse_layer_idx": config.scale_attention_by_inverse_layer,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.eos_token_id,  # as GPT-2's is
        "eos_token_id": config.eos_token_id,
        "dtype": config.dtype,
        "torch_dtype": config.dtype,  # its name before transformers 4.56
    }


def _tokenizer_config(config: ModelConfig, tokenizer: str) -> dict[str, Any]:
    """Returns what `AutoTokenizer` needs beside the tokenizer itself."""
    fields: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    if config.eos_token_id is not None:
        token = Tokenizer.from_str(tokenizer).id_to_token(config.eos_token_id)
        fields |= {} if token is None else {"bos_token": token, "eos_token": token}
    return fields


def _notes(config: ModelConfig) -> tuple[str, ...]:
    assert config.padded_vocab_size is not None  # set by ModelConfig
    notes = []
    if not config.use_bias:
        notes.append("GPT-2 has biases there: zeros stand for those that this model has not")
    if padding := config.padded_vocab_size - config.vocab_size:
        notes.append(f"rows of padding left out behind the {config.vocab_size} tokens: {padding}")
    return tuple(notes)


def _write_json(file: Path, data: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
