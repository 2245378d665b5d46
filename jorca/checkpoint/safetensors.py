"""Reads safetensors files as views of a memory map.

Such a file is the length of a header, the header (JSON: dtype, shape and place of every tensor), and the
bytes. The `safetensors` library checks the header; the bytes are mapped here, since the library copies them.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Final

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import safetensors

from jorca.checkpoint.errors import CheckpointError

DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The dtypes of the format, but for those that no GPT is kept in."""

_LENGTH: Final = struct.Struct("<Q")


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file by name.

    Args:
      path: The file. It must stay as it is while the arrays are in use.

    Returns:
      Read-only arrays that map the file, so that bytes are read when they are used; bfloat16 has the dtype
      of `ml_dtypes`.

    Raises:
      CheckpointError: The file is unreadable, cut or damaged, or names a tensor twice.
    """
    path = Path(path)
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass  # opening it checks that the tensors fill the file, without gaps and overlaps
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            header = json.loads(file.read(length), object_pairs_hook=_unique)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from error
    # As a plain ndarray, since the subclass memmap would follow into every view.
    data = np.memmap(path, mode="r").view(np.ndarray)[_LENGTH.size + length :]
    return {
        name: _tensor(path, data, name, entry) for name, entry in header.items() if name != "__metadata__"
    }


def _tensor(path: Path, data: np.ndarray, name: str, entry: dict[str, Any]) -> np.ndarray:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{path}: {name} is {entry['dtype']}; dtypes that can be read are {', '.join(DTYPES)}"
        )
    start, end = entry["data_offsets"]
    # Writers align tensors; where one did not, its bytes are copied to memory here.
    tensor = np.require(data[start:end].view(DTYPES[entry["dtype"]]), requirements="A")
    return tensor.reshape(entry["shape"])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"its header has {', '.join(twice)} more than once")
    return result
