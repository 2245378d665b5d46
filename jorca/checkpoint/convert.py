"""Foreign weights to jorca's: a format is a table, and one function applies any table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from jorca.checkpoint.errors import CheckpointError
from jorca.config import DTYPE_BYTES, Dtype, ModelConfig
from jorca.model.params import param_table


def keep(x: np.ndarray) -> np.ndarray:
    """Returns the array as it is: vectors, embeddings, and kernels stored [in, out]."""
    return x


def transpose(x: np.ndarray) -> np.ndarray:
    """Returns a view of a kernel stored [out, in] as [in, out]."""
    return x.T


_ROWS: Final = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where one parameter comes from.

    Attributes:
      key: The tensor's name in the foreign checkpoint.
      shape: The shape it must have there.
      transform: What brings its elements into the order of the parameter table, whose shape the result
        takes. It must follow from the format, never from the shape: a square kernel fits either way.
    """

    key: str
    shape: tuple[int, ...]
    transform: Callable[[np.ndarray], np.ndarray] = keep


Table = Mapping[str, Source]
"""A format: the source of every parameter, by the parameter's name."""


def strip_prefixes(
    tensors: Mapping[str, Any], prefixes: Sequence[str] = ("module.", "_orig_mod.")
) -> dict[str, Any]:
    """Returns the tensors by names without what wrappers put in front of them.

    Args:
      tensors: Tensors by name.
      prefixes: Stripped from the front only and repeatedly, in whatever order they come. The default is
        what data-parallel and compiled PyTorch modules add.

    Raises:
      CheckpointError: Two names become one.
    """
    stripped: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, tensor in tensors.items():
        name = key
        while prefix := next((p for p in prefixes if name.startswith(p)), None):
            name = name.removeprefix(prefix)
        if name in stripped:
            raise CheckpointError(f"{origin[name]!r} and {key!r} are both {name!r}; remove one of them")
        stripped[name], origin[name] = tensor, key
    return stripped


def apply_table(
    tensors: Mapping[str, Any], table: Table, config: ModelConfig, ignored: Collection[str] = ()
) -> dict[str, np.ndarray]:
    """Returns the parameters of `config`, as views of the tensors wherever NumPy can make one.

    Args:
      tensors: The foreign tensors by name, free of prefixes.
      table: The format; it names a source for every parameter of `config`.
      config: The model.
      ignored: Names that may be there and carry no weights, such as mask buffers. They are exact.

    Raises:
      CheckpointError: Tensors are missing, left over, misshapen or not floating point; it lists them all.
    """
    params = param_table(config)
    assert table.keys() == params.keys(), "a format's table covers the parameter table"
    wanted = {source.key: source for source in table.values()}
    assert len(wanted) == len(table), "a format's table uses no tensor twice"
    problems = [f"missing: {key}" for key in wanted if key not in tensors]
    problems += [
        f"not part of this model: {key}" for key in tensors if key not in wanted and key not in ignored
    ]
    found = {key: tensors[key] for key in wanted if key in tensors}  # once: a shard may be joined for it
    for key, tensor in found.items():
        source = wanted[key]
        if not isinstance(tensor, np.ndarray):
            problems.append(f"not a tensor: {key} ({type(tensor).__name__})")
        elif tensor.shape != source.shape:
            problems.append(f"wrong shape: {key} is {tensor.shape}, this model needs {source.shape}")
        elif tensor.dtype.name not in (*DTYPE_BYTES, "float64"):
            problems.append(f"not floating point: {key} is {tensor.dtype}")
    if problems:
        raise CheckpointError("the tensors do not fit the model:\n  " + "\n  ".join(problems))
    return {
        name: source.transform(found[source.key]).reshape(params[name].shape)
        for name, source in table.items()
    }


def same_bits(x: Any, y: Any) -> bool:
    """Returns whether two arrays are equal bit for bit, shape and dtype too; looks at a few rows a time."""
    if not (isinstance(x, np.ndarray) and isinstance(y, np.ndarray)):
        return False
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    x, y = np.atleast_1d(x, y)
    return all(x[i : i + _ROWS].tobytes() == y[i : i + _ROWS].tobytes() for i in range(0, len(x), _ROWS))


def common_dtype(params: Mapping[str, np.ndarray]) -> Dtype:
    """Returns the dtype that all parameters have.

    Raises:
      CheckpointError: They have several, or one that models are not served in.
    """
    names = sorted({x.dtype.name for x in params.values()})
    for dtype in ("float32", "bfloat16", "float16"):
        if names == [dtype]:
            return dtype
    raise CheckpointError(
        f"the tensors are {' and '.join(names)}; say which dtype to convert them to: "
        f"dtype must be one of {', '.join(DTYPE_BYTES)}"
    )


def stored_dtype(tensors: Mapping[str, Any], table: Table) -> Dtype:
    """Returns the dtype that the tensors of a table have in common, float32 if there is none."""
    arrays = {source.key: tensors.get(source.key) for source in table.values()}
    try:
        return common_dtype({key: x for key, x in arrays.items() if isinstance(x, np.ndarray)})
    except CheckpointError:
        return "float32"


def cast(x: np.ndarray, dtype: Dtype, name: str) -> np.ndarray:
    """Returns an array in `dtype`, rounded to nearest; one that has it already is not copied.

    Raises:
      CheckpointError: A finite value lies beyond what `dtype` can hold; `name` says where.
    """
    with np.errstate(over="ignore"):  # it is asked below, of every dtype alike
        y = x.astype(np.dtype(dtype), copy=False)
    if y is not x and (np.isfinite(x) & ~np.isfinite(y)).any():
        raise CheckpointError(f"{name} holds values too large for {dtype}; choose another dtype")
    return y
