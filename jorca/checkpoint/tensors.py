"""Tensors by name from one file or from a set of shards, memory-mapped, whatever wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from jorca.checkpoint.errors import CheckpointError
from jorca.checkpoint.pytorch import read_pytorch
from jorca.checkpoint.safetensors import read_safetensors

INDEX_SUFFIX: Final = ".index.json"
"""How the index of a sharded set ends; the files that it names lie beside it."""


def read_tensors(path: str | Path) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """Reads a state dict, whole or in shards, and without its tensors' bytes.

    Args:
      path: A `.safetensors` file, a file of `torch.save` that holds a dict of tensors by name, or the
        `.index.json` of a sharded set of either. The files must stay as they are while the tensors are in
        use.

    Returns:
      The tensors by name, as read-only views of memory maps, and the files they come from.

    Raises:
      CheckpointError: A file is missing or damaged, or index and shards differ; it lists all differences.
    """
    path = Path(path)
    if path.name.endswith(INDEX_SUFFIX):
        return _read_shards(path)
    return _read_file(path), (path,)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
      CheckpointError: The file cannot be read, or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(data).__name__}")
    return data


def state_dict(value: Any, path: Path) -> dict[str, Any]:
    """Returns `value` if it is a dict by strings, as a state dict is.

    Raises:
      CheckpointError: It is not.
    """
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"{path}: holds no state dict (a dict of tensors by name)")
    return value


def _read_file(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        return dict(read_safetensors(path))
    return state_dict(read_pytorch(path), path)


def _read_shards(index: Path) -> tuple[dict[str, Any], tuple[Path, ...]]:
    file_of = read_json(index).get("weight_map")
    if not isinstance(file_of, dict) or not file_of or not all(isinstance(f, str) for f in file_of.values()):
        raise CheckpointError(f"{index}: has no weight_map, which says in which file each tensor lies")
    names = sorted(set(file_of.values()))
    problems = [f"not a file beside the index: {name!r}" for name in names if Path(name).name != name]
    problems += [f"missing file: {name}" for name in names if not (index.parent / name).is_file()]
    if problems:
        raise CheckpointError(_listed(index, problems))
    shards = {name: _read_file(index.parent / name) for name in names}
    problems = [f"missing: {key}, in {name}" for key, name in file_of.items() if key not in shards[name]]
    for name, tensors in shards.items():
        problems += [f"not in the index: {key}, in {name}" for key in tensors if key not in file_of]
        problems += [
            f"twice: {key}, in {name} and in {file_of[key]}"
            for key in tensors
            if file_of.get(key, name) != name and key in shards[file_of[key]]
        ]
    if problems:
        raise CheckpointError(_listed(index, problems))
    tensors = {key: shards[name][key] for key, name in file_of.items()}
    return tensors, (index, *(index.parent / name for name in names))


def _listed(index: Path, problems: list[str]) -> str:
    return f"{index}: does not fit its files:\n  " + "\n  ".join(problems)
