"""Hugging Face's GPT-2: `config.json` beside safetensors or `pytorch_model.bin`, whole or in shards.

Facts of the format: linear layers are `Conv1D`, so kernels lie [in, out]; names begin with `transformer.`
unless the bare model was saved; a tied head is left out; `attn.bias` and `attn.masked_bias` are masks that
older versions stored. Attention is float32 here, so `reorder_and_upcast_attn` asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.foreign import Foreign, Overrides
from jorca.checkpoint.gpt2 import GPT2_EOS, Recorded, gpt2_foreign
from jorca.checkpoint.tensors import INDEX_SUFFIX, read_json, read_tensors
from jorca.checkpoint.tokenizer_files import tokenizer_json
from jorca.config import Activation

_WEIGHTS: Final = (
    "model.safetensors",
    f"model.safetensors{INDEX_SUFFIX}",
    "pytorch_model.bin",
    f"pytorch_model.bin{INDEX_SUFFIX}",
)
"""Files of weights; of several in a folder the first counts."""

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
}
_ALIASES: Final = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Names that `GPT2Config` takes as well."""


class HuggingFace:
    """A GPT-2 of the `transformers` library."""

    name = "hf"

    def recognises(self, path: Path) -> bool:
        """Returns whether the folder holds weights by Hugging Face's names, or the file is called so."""
        return bool(_weights(path))

    def read(self, path: Path, overrides: Overrides) -> Foreign:
        """Reads a folder, or a file of weights with `config.json` beside it."""
        weights = _weights(path)
        if not weights:
            raise CheckpointError(f"{path}: holds none of {', '.join(_WEIGHTS)}")
        config_file = weights[0].with_name("config.json")
        notes = [f"{file.name} is left out; {weights[0].name} is read" for file in weights[1:]]
        settings = overrides.renamed(read_json(config_file))
        settings = {_ALIASES.get(key, key): value for key, value in settings.items()}
        try:
            recorded = _recorded(settings, overrides, notes)
        except CheckpointError as error:
            raise CheckpointError(f"{config_file}: {error}") from error
        tensors, files = read_tensors(weights[0])
        return gpt2_foreign(
            tensors,
            recorded,
            overrides,
            format=self.name,
            path=path,
            files=(*files, config_file),
            out_in=False,
            tokenizer=tokenizer_json(config_file.parent),
            notes=notes,
        )


def _weights(path: Path) -> list[Path]:
    if path.is_dir():
        return [path / name for name in _WEIGHTS if (path / name).is_file()]
    suffixes = (".safetensors", ".bin", f".safetensors{INDEX_SUFFIX}", f".bin{INDEX_SUFFIX}")
    return [path] if path.name.endswith(suffixes) and path.is_file() else []


def _recorded(settings: Mapping[str, Any], overrides: Overrides, notes: list[str]) -> Recorded:
    """Returns what config.json says; what it leaves out is GPT-2's, as in `GPT2Config`."""
    if settings.get("model_type") != "gpt2":
        raise CheckpointError(f"model_type must be gpt2, got {settings.get('model_type')!r}")
    if settings.get("add_cross_attention"):
        raise CheckpointError("add_cross_attention must be false: there is no encoder to attend to")
    return Recorded(
        where="config.json",
        settings=settings,
        use_bias=True,
        tie_embeddings=settings.get("tie_word_embeddings", True),
        fields={
            "activation": _activation(settings, overrides),
            "norm_epsilon": settings.get("layer_norm_epsilon", 1e-5),
            "scale_attention": settings.get("scale_attn_weights", True),
            "scale_attention_by_inverse_layer": settings.get("scale_attn_by_inverse_layer_idx", False),
            "eos_token_id": _eos(settings, notes),
        },
    )


def _activation(settings: Mapping[str, Any], overrides: Overrides) -> Activation:
    if overrides.activation is not None:
        return overrides.activation
    name = settings.get("activation_function", "gelu_new")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise CheckpointError(f"activation_function must be one of {', '.join(_ACTIVATIONS)}, got {name!r}")
    return _ACTIVATIONS[name]


def _eos(settings: Mapping[str, Any], notes: list[str]) -> Any:
    """Returns the end-of-text token; a model has one here, and it is a token."""
    eos = settings.get("eos_token_id", GPT2_EOS)
    if isinstance(eos, list) and eos:
        notes += [f"eos_token_id is {eos}; the first ends a text, the others can be stop_token_ids"] * (
            len(eos) > 1
        )
        eos = eos[0]
    vocab_size = settings.get("vocab_size")
    if isinstance(eos, int) and isinstance(vocab_size, int) and eos >= vocab_size:
        if "eos_token_id" in settings:
            notes.append(
                f"eos_token_id {eos} lies outside the vocabulary of {vocab_size}; the model has none"
            )
        return None
    return eos
