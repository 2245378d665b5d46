"""The parameter table: every weight of a GPT by name, shape, dtype and logical axes.

Initialisation, checkpoints, sharding and memory planning all read this one table, so that a name, a shape or
a dtype is stated once. Weights travel as a flat dict from these names to arrays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from jorca.config import DTYPE_BYTES, Dtype, ModelConfig

Init = Literal["normal", "residual", "zeros", "ones"]


@dataclasses.dataclass(frozen=True, slots=True)
class ParamInfo:
    """One weight.

    Attributes:
      name: Dotted path, for example "layers.0.attention.qkv.kernel".
      shape: Its shape.
      axes: A logical axis per dimension: "vocab", "position", "embed", "qkv", "heads", "head",
        "mlp". Sharding rules map these to mesh axes.
      init: How a fresh model fills it: normal(0.02), the same divided by sqrt(2 L) for what is added
        to the residual stream (GPT-2), zeros or ones.
      dtype: What a model that is served holds it in.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    dtype: Dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * DTYPE_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelPart:
    """What one pipeline stage holds of a model: consecutive layers, and perhaps one of its ends.

    Attributes:
      layers: The layers, numbered from 0 in the whole model.
      has_embed: Whether tokens come in here.
      has_head: Whether logits come out here. A tied head's table is held here too.
    """

    layers: range
    has_embed: bool = True
    has_head: bool = True


def param_table(config: ModelConfig, part: ModelPart | None = None) -> dict[str, ParamInfo]:
    """Returns every weight of a model, or of a part of it, by name in the order of the forward pass."""
    part = ModelPart(range(config.num_layers)) if part is None else part
    d, n, h, f, v = config.d_model, config.num_heads, config.head_dim, config.d_ff, config.padded_vocab_size
    assert f is not None  # set by ModelConfig, and so is the next
    assert v is not None
    table: dict[str, ParamInfo] = {}

    def add(name: str, shape: tuple[int, ...], axes: tuple[str, ...], init: Init = "normal") -> None:
        table[name] = ParamInfo(name, shape, axes, init, config.dtype)

    def add_bias(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
        if config.use_bias:
            add(f"{name}.bias", shape, axes, "zeros")

    def add_norm(name: str) -> None:
        add(f"{name}.scale", (d,), ("embed",), "ones")
        add_bias(name, (d,), ("embed",))

    if part.has_embed or (part.has_head and config.tie_embeddings):
        add("embed.tokens", (v, d), ("vocab", "embed"))
    if part.has_embed:
        add("embed.positions", (config.max_positions, d), ("position", "embed"))
    for i in part.layers:
        at = f"layers.{i}"
        add_norm(f"{at}.attention_norm")
        # Kept [D, 3, N, H]: split by heads, a flat [D, 3D] would mix queries, keys and values.
        add(f"{at}.attention.qkv.kernel", (d, 3, n, h), ("embed", "qkv", "heads", "head"))
        add_bias(f"{at}.attention.qkv", (3, n, h), ("qkv", "heads", "head"))
        add(f"{at}.attention.out.kernel", (n, h, d), ("heads", "head", "embed"), "residual")
        add_bias(f"{at}.attention.out", (d,), ("embed",))
        add_norm(f"{at}.mlp_norm")
        add(f"{at}.mlp.up.kernel", (d, f), ("embed", "mlp"))
        add_bias(f"{at}.mlp.up", (f,), ("mlp",))
        add(f"{at}.mlp.down.kernel", (f, d), ("mlp", "embed"), "residual")
        add_bias(f"{at}.mlp.down", (d,), ("embed",))
    if part.has_head:
        add_norm("final_norm")
        if not config.tie_embeddings:
            add("head.kernel", (v, d), ("vocab", "embed"))
    return table


def num_params(config: ModelConfig) -> int:
    """Returns the number of weights, a tied head counted once."""
    return sum(info.size for info in param_table(config).values())


def param_bytes(config: ModelConfig) -> int:
    """Returns the bytes of all weights, a tied head counted once."""
    return sum(info.nbytes for info in param_table(config).values())


def mismatches(
    config: ModelConfig, arrays: Mapping[str, Any], *, any_dtype: bool = False, may_lack_padding: bool = False
) -> list[str]:
    """Lists how arrays differ from the parameter table, in words; an empty list if they fit.

    Args:
      config: The model.
      arrays: What stands for its weights, by name: anything with a shape and a dtype.
      any_dtype: Whether the dtype does not matter.
      may_lack_padding: Whether an array may have fewer rows than a padded vocabulary has: see `pad_widths`.
    """
    table = param_table(config)
    problems = [f"missing: {name}" for name in table if name not in arrays]
    problems += [f"not part of this model: {name}" for name in arrays if name not in table]
    for name, info in table.items():
        if name not in arrays:
            continue
        shape, dtype = tuple(arrays[name].shape), str(arrays[name].dtype)
        rows = shape[0] if shape else 0
        lacks = may_lack_padding and info.axes[0] == "vocab" and config.vocab_size <= rows <= info.shape[0]
        if shape != ((rows, *info.shape[1:]) if lacks else info.shape):
            problems.append(f"wrong shape: {name} is {shape}, the config needs {info.shape}")
        if dtype != info.dtype and not any_dtype:
            problems.append(f"wrong dtype: {name} is {dtype}")
    return problems


def pad_widths(shape: tuple[int, ...], rows: int) -> list[tuple[int, int]]:
    """Returns what `pad` of NumPy and JAX needs to bring an array to so many rows with zeros behind its own.

    That is how a vocabulary gets its padding wherever weights that lack it are brought to devices.
    """
    return [(0, rows - shape[0]), *[(0, 0)] * (len(shape) - 1)]
