"""Foreign weights to jorca's: a format is a table, and one function applies any table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

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
    for key, source in wanted.items():
        tensor = tensors.get(key)
        if tensor is None:
            continue
        if not isinstance(tensor, np.ndarray):
            problems.append(f"not a tensor: {key} ({type(tensor).__name__})")
        elif tensor.shape != source.shape:
            problems.append(f"wrong shape: {key} is {tensor.shape}, this model needs {source.shape}")
        elif tensor.dtype.name not in (*DTYPE_BYTES, "float64"):
            problems.append(f"not floating point: {key} is {tensor.dtype}")
    if problems:
        raise CheckpointError("the tensors do not fit the model:\n  " + "\n  ".join(problems))
    return {
        name: source.transform(tensors[source.key]).reshape(params[name].shape)
        for name, source in table.items()
    }


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


def cast(params: Mapping[str, np.ndarray], dtype: Dtype) -> dict[str, np.ndarray]:
    """Returns the parameters in `dtype`, rounded to nearest; those that have it already are not copied.

    Raises:
      CheckpointError: A finite value lies beyond what `dtype` can hold.
    """
    result: dict[str, np.ndarray] = {}
    for name, x in params.items():
        try:
            with np.errstate(over="raise"):
                result[name] = x.astype(np.dtype(dtype), copy=False)
        except FloatingPointError as error:
            raise CheckpointError(
                f"{name} holds values too large for {dtype}; choose another dtype"
            ) from error
    return result
