"""minGPT's `model.pt`, a bare state dict, with the `config.json` that its projects write.

Facts of the format: kernels lie [out, in]; all layers have biases; GELU is the tanh form; the head is a
weight of its own; `attn.bias` is the causal mask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.foreign import Foreign, Overrides
from jorca.checkpoint.gpt2 import Recorded, gpt2_foreign
from jorca.checkpoint.pytorch import is_pytorch_file, read_pytorch
from jorca.checkpoint.tensors import read_json, state_dict
from jorca.checkpoint.tokenizer_files import tokenizer_json

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

_FILE: Final = "model.pt"


class MinGPT:
    """A state dict of minGPT."""

    name = "mingpt"

    def recognises(self, path: Path) -> bool:
        """Returns whether the folder has a model.pt, or the file holds a bare state dict."""
        if path.is_dir():
            return (path / _FILE).is_file()
        if not is_pytorch_file(path) or path.suffix == ".bin":  # which is how Hugging Face calls such files
            return False
        try:
            saved = read_pytorch(path)
        except CheckpointError:
            return False
        return isinstance(saved, dict) and any(str(key).endswith("wte.weight") for key in saved)

    def read(self, path: Path, overrides: Overrides) -> Foreign:
        """Reads `model.pt`, or the file that is given, and the config.json beside it if there is one."""
        file = path / _FILE if path.is_dir() else path
        config_file = file.with_name("config.json")
        settings: dict[str, Any] = {}
        files = [file]
        if config_file.exists():
            files.append(config_file)
            settings = _read_config(config_file, overrides)
        return gpt2_foreign(
            state_dict(read_pytorch(file), file),
            Recorded(
                where="config.json" if len(files) > 1 else "a bare state dict",
                settings=settings,
                tie_embeddings=False,
                fields={"activation": "gelu_tanh"},
            ),
            overrides,
            format=self.name,
            path=file,
            files=files,
            out_in=True,
            tokenizer=tokenizer_json(file.parent),
            notes=(),
        )


def _read_config(path: Path, overrides: Overrides) -> dict[str, Any]:
    """Returns the model part of minGPT's config.json, with its model type spelled out."""
    data = read_json(path)
    fields = data.get("model", data)
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: is not minGPT's config.json, whose model part is an object")
    fields = overrides.renamed({key: value for key, value in fields.items() if value is not None})
    model_type = fields.pop("model_type", None)
    if model_type is None:
        return fields
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
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
