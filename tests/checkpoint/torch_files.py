"""Writes files in the format of `torch.save`, opcode by opcode, since there is no PyTorch here."""

import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float64": "DoubleStorage",
    "int64": "LongStorage",
    "bool": "BoolStorage",
}


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value):
    data = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def sequence(*parts):
    return b"(" + b"".join(parts) + b"t"


def mapping(**items):
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def call(function, *arguments):
    return function + sequence(*arguments) + b"R"


def storage(key, kind, num_elements):
    return sequence(text("storage"), name("torch", kind), text(key), text("cpu"), number(num_elements)) + b"Q"


def tensor(stored, shape, strides, offset=0):
    dims = (sequence(*map(number, shape)), sequence(*map(number, strides)))
    hooks = call(name("collections", "OrderedDict"))
    return call(name("torch._utils", "_rebuild_tensor_v2"), stored, number(offset), *dims, b"\x89", hooks)


def write(path: Path, program: bytes, storages=None, *, byteorder=None, compress=False, root="archive"):
    """Writes an archive whose pickle is `program`, without PROTO and STOP, and returns its path."""
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(f"{root}/data.pkl", b"\x80\x02" + program + b".")
        for key, data in (storages or {}).items():
            archive.writestr(f"{root}/data/{key}", data)
        if byteorder is not None:
            archive.writestr(f"{root}/byteorder", byteorder)
        archive.writestr(f"{root}/version", "3\n")
    return path


def encode(value: Any, storages: dict[str, bytes]) -> bytes:
    """Returns the opcodes of a plain value; arrays become tensors, whose bytes go to `storages`."""
    if isinstance(value, np.ndarray):
        key = str(len(storages))
        storages[key] = np.ascontiguousarray(value).tobytes()
        strides = [int(np.prod(value.shape[axis + 1 :])) for axis in range(value.ndim)]
        return tensor(storage(key, KINDS[value.dtype.name], value.size), value.shape, strides)
    if isinstance(value, dict):
        items = (encode(key, storages) + encode(item, storages) for key, item in value.items())
        return b"}(" + b"".join(items) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(encode(item, storages) for item in value) + b"e"
    if isinstance(value, bool | None):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    return text(value) if isinstance(value, str) else number(value)


def save(path: Path, value: Any) -> Path:
    """Writes a plain value with arrays in it, as `torch.save` does."""
    storages: dict[str, bytes] = {}
    return write(path, encode(value, storages), storages)
