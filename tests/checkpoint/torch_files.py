"""Writes files in the format of `torch.save`, opcode by opcode, since there is no PyTorch here."""

import struct
import zipfile
from pathlib import Path


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
