"""Reads what `torch.save` wrote, without PyTorch and without running the pickle inside.

Such a file is a zip archive: `data.pkl` describes the object, `data/<key>` holds the bytes of one
storage, and a tensor is a view (offset, shape, strides) of a storage. A pickle is a program that may call
whatever it can name, so here it can name nothing but the inert stand-ins of `_STAND_INS`.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

from jorca.checkpoint.errors import CheckpointError

_LEGACY_MAGIC: Final = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""How files of PyTorch before 1.6 begin: the pickled number 0x1950a86a20f9469cfc6c."""
_ZIP_MAGIC: Final = b"PK\x03\x04"
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
"""Zip's local file header: signature, ..., length of the name, length of the extra field."""


def is_pytorch_file(path: Path) -> bool:
    """Returns whether a file begins as `read_pytorch` needs it."""
    try:
        with path.open("rb") as file:
            return file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    except OSError:
        return False


def read_pytorch(path: str | Path) -> Any:
    """Reads a `.pt`, `.pth` or `.bin` file of PyTorch 1.6 or newer.

    The pickle inside may use dicts, lists, tuples, numbers, strings, tensors, parameters, `OrderedDict`,
    `argparse.Namespace`, `torch.Size`, `torch.device` and dtypes. Any other name that it mentions, a
    function or a class of whatever package, ends the reading before that name is even looked up.

    Args:
      path: The file. It must stay as it is while the arrays are in use.

    Returns:
      The saved object. Tensors are read-only NumPy arrays that map the file, so that bytes are read when
      they are used; bfloat16 has the dtype of `ml_dtypes`. Tensors that shared a storage share it still.
      An `OrderedDict` or a `Namespace` comes back as a dict, a dtype or a device as its name.

    Raises:
      CheckpointError: The file is no such archive, is cut or damaged, or its pickle asks for more.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(len(_LEGACY_MAGIC))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if head == _LEGACY_MAGIC:
        raise CheckpointError(
            f"{path}: is in PyTorch's format from before version 1.6, which is not supported; load it with "
            "PyTorch and save it again (torch.save writes the present format)"
        )
    if not head.startswith(_ZIP_MAGIC):
        raise CheckpointError(f"{path}: is not a file that torch.save wrote (not a zip archive)")
    try:
        with zipfile.ZipFile(path) as archive:
            members = _Archive(path, archive)
            return _unpickle(_TorchUnpickler, path, members.member("data.pkl").tobytes(), members)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path}: is damaged or was cut short; fetch it again ({error})") from error


def read_pickle(path: str | Path) -> Any:
    """Reads a pickle of plain values, such as nanoGPT's `meta.pkl`, as safely as `read_pytorch`.

    Raises:
      CheckpointError: It cannot be read, is malformed, or names anything that plain values do not need.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return _unpickle(_Unpickler, path, data)


def _unpickle(kind: type[_Unpickler], path: Path, data: bytes, *more: Any) -> Any:
    try:
        return kind(path, data, *more).load()
    except (CheckpointError, zipfile.BadZipFile):
        raise
    except Exception as error:  # a malformed pickle fails in as many ways as it has opcodes
        raise CheckpointError(f"{path}: its pickle is malformed ({type(error).__name__}: {error})") from error


class _Archive:
    """The members of one archive as views of one memory map of the file."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path = path
        self._members = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in self._members if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1 or len(self._members) != len(archive.infolist()):
            raise CheckpointError(f"{path}: is a zip archive but not one that torch.save wrote")
        self._root = pickles[0].removesuffix("data.pkl")
        # As a plain ndarray, since the subclass memmap would follow into every view.
        self._bytes: np.ndarray = np.memmap(path, mode="r").view(np.ndarray)
        order = bytes(self.member("byteorder")) if f"{self._root}byteorder" in self._members else b"little"
        if order not in (b"little", b"big"):
            raise CheckpointError(f"{path}: byteorder must be little or big, got {order[:20]!r}")
        self.byteorder = order.decode()

    def member(self, name: str) -> np.ndarray:
        """Returns the bytes [n] of a member, read-only."""
        info = self._members.get(f"{self._root}{name}")
        if info is None:
            raise CheckpointError(f"{self.path}: has no member {name!r}; it is incomplete")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise CheckpointError(
                f"{self.path}: member {name!r} is compressed or encrypted, which torch.save never does; "
                "unpack the archive and pack it without compression (zip -0 -r)"
            )
        # The central directory does not say where the data begin: the local header may be longer.
        header = self._bytes[info.header_offset : info.header_offset + _LOCAL_HEADER.size].tobytes()
        if len(header) < _LOCAL_HEADER.size or not header.startswith(_ZIP_MAGIC):
            raise CheckpointError(f"{self.path}: member {name!r} has no header; the file is damaged")
        _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if start + info.file_size > self._bytes.size:
            raise CheckpointError(f"{self.path}: member {name!r} reaches past the end of the file")
        return self._bytes[start : start + info.file_size]


class _StorageType(NamedTuple):
    """Stand-in for `torch.FloatStorage` and its like."""

    dtype: str


class _Storage(NamedTuple):
    """A storage: its elements [n], read-only."""

    elements: np.ndarray


class _Function(NamedTuple):
    """Stand-in for a function. Unlike a function it has no attributes that a pickle could set."""

    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


class _OrderedDict(dict):
    """Stand-in for `collections.OrderedDict`; the version notes that modules attach are dropped."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class _Namespace(dict):
    """Stand-in for `argparse.Namespace`: its attributes as a dict."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        self.update(state)


class _Inert:
    """Stand-in for what lies beside weights and is of no use here: it takes everything and keeps nothing."""

    __slots__ = ()

    def __new__(cls, *args: Any) -> _Inert:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def _rebuild_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> np.ndarray:
    """Returns the view of `storage` that a tensor is; offset and strides count elements."""
    sizes = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or any(type(n) is not int or n < 0 for n in sizes):
        raise CheckpointError(
            f"a tensor has an invalid offset, shape or strides: {offset}, {shape}, {strides}"
        )
    if len(shape) != len(strides):
        raise CheckpointError(f"a tensor has shape {shape} but strides {strides}")
    elements = storage.elements
    if 0 in shape:
        return np.empty(shape, elements.dtype)
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if last >= elements.size:
        raise CheckpointError(
            f"a tensor (offset {offset}, shape {shape}, strides {strides}) reaches element {last} of a "
            f"storage that holds {elements.size}"
        )
    return np.lib.stride_tricks.as_strided(
        elements[offset:], shape, [stride * elements.itemsize for stride in strides], writeable=False
    )


# Everything that a pickle may name. None of it is PyTorch's or the standard library's own: BUILD calls
# `__setstate__` of what it finds, or else sets attributes, and on these it can do neither harm.
_STAND_INS: Final[dict[tuple[str, str], Any]] = {
    ("collections", "OrderedDict"): _OrderedDict,
    ("argparse", "Namespace"): _Namespace,
    ("torch", "Size"): _Function(tuple),
    ("torch", "device"): _Function(lambda *parts: ":".join(map(str, parts))),
    ("torch._utils", "_rebuild_tensor_v2"): _Function(_rebuild_tensor),
    ("torch._utils", "_rebuild_parameter"): _Function(lambda data, requires_grad, hooks: data),
    ("torch", "FloatStorage"): _StorageType("float32"),
    ("torch", "HalfStorage"): _StorageType("float16"),
    ("torch", "BFloat16Storage"): _StorageType("bfloat16"),
    ("torch", "DoubleStorage"): _StorageType("float64"),
    ("torch", "LongStorage"): _StorageType("int64"),
    ("torch", "IntStorage"): _StorageType("int32"),
    ("torch", "ShortStorage"): _StorageType("int16"),
    ("torch", "CharStorage"): _StorageType("int8"),
    ("torch", "ByteStorage"): _StorageType("uint8"),
    ("torch", "BoolStorage"): _StorageType("bool"),
    **{("torch", name): f"torch.{name}" for name in ("float32", "float16", "bfloat16", "float64", "int64")},
    # The state of a random generator, which Megatron-LM saves with its weights.
    ("numpy.core.multiarray", "_reconstruct"): _Inert,
    ("numpy._core.multiarray", "_reconstruct"): _Inert,
    ("numpy", "ndarray"): _Inert,
    ("numpy", "dtype"): _Inert,
    ("_codecs", "encode"): _Inert,
    # An argument of its training run.
    ("megatron.core.enums", "ModelType"): _Inert,
    ("megatron.model.enums", "ModelType"): _Inert,
    ("megatron.enums", "ModelType"): _Inert,
}


class _Unpickler(pickle.Unpickler):
    """Unpickles with stand-ins for every name."""

    def __init__(self, path: Path, data: bytes) -> None:
        for opcode, argument, _ in pickletools.genops(data):
            # The memo is an array: one absurd index would fill the machine's memory.
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(data):
                raise CheckpointError(f"{path}: its pickle is malformed (memo index {argument})")
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Returns the stand-in for a name, or raises; nothing is ever imported."""
        try:
            return _STAND_INS[module_name, global_name]
        except KeyError:
            raise CheckpointError(
                f"{self._path}: its pickle asks for {f'{module_name}.{global_name}'[:200]!r}, which "
                "weights do not need and which could run code; nothing was run. If the file is yours, save "
                "its state_dict alone"
            ) from None


class _TorchUnpickler(_Unpickler):
    """Unpickles `data.pkl`, whose tensors lie in other members of the archive."""

    def __init__(self, path: Path, data: bytes, archive: _Archive) -> None:
        super().__init__(path, data)
        self._archive = archive
        self._storages: dict[str, _Storage] = {}

    def persistent_load(self, pid: Any, /) -> _Storage:
        """Returns the storage that `("storage", type, key, device, number of elements)` names."""
        kind, storage_type, key, _device, num_elements = pid
        if kind != "storage" or not isinstance(storage_type, _StorageType) or type(num_elements) is not int:
            raise CheckpointError(f"{self._archive.path}: data.pkl names an unknown kind of storage")
        if key not in self._storages:
            self._storages[key] = self._read_storage(f"data/{key}", np.dtype(storage_type.dtype))
        storage = self._storages[key]
        if (storage.elements.dtype, storage.elements.size) != (np.dtype(storage_type.dtype), num_elements):
            raise CheckpointError(
                f"{self._archive.path}: storage {key!r} should hold {num_elements} elements of "
                f"{storage_type.dtype}, but holds {storage.elements.size} of {storage.elements.dtype}"
            )
        return storage

    def _read_storage(self, name: str, dtype: np.dtype) -> _Storage:
        member = self._archive.member(name)
        if member.size % dtype.itemsize:
            raise CheckpointError(
                f"{self._archive.path}: member {name!r} has {member.size} bytes, which are no whole {dtype}"
            )
        if self._archive.byteorder != sys.byteorder and dtype.itemsize > 1:
            member = member.view(f"u{dtype.itemsize}").byteswap().view(np.uint8)
        # PyTorch aligns storages; an archive that was packed again may not, and is copied to memory here.
        return _Storage(np.require(member.view(dtype), requirements="A"))
