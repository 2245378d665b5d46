"""Which mesh axis splits which weights: one table from the parameter table's logical axes to a mesh's.

The three split axes are those of Megatron (Shoeybi et al., 2019): heads and feed-forward units, so that a
layer needs one sum over devices behind its attention and one behind its feed-forward part, and the rows of
the vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jorca.config import ConfigError, ModelConfig
from jorca.model.params import ModelPart, param_table

RULES: Final[Mapping[str, str | None]] = MappingProxyType(
    {
        "vocab": "tensor",
        "heads": "tensor",
        "kv_heads": "tensor",
        "mlp": "tensor",
        "position": None,
        "embed": None,
        "qkv": None,
        "head": None,
    }
)
"""Logical axis -> mesh axis that splits it, None for an axis that stays whole on every device."""

BY_HEADS: Final = PartitionSpec(None, RULES["heads"])
"""How queries [T, N, H] are split; each device has the query heads of its own key/value heads."""
BY_KV_HEADS: Final = PartitionSpec(None, RULES["kv_heads"])
"""How keys and values [T, N_kv, H] are split."""
KV_ARRAY: Final = PartitionSpec(None, None, RULES["kv_heads"])
"""How the KV array [L, P, N_kv, S, H] is split: a device has its heads of every page."""

_FIELDS: Final = {"heads": "num_heads", "kv_heads": "num_kv_heads", "mlp": "d_ff"}
"""Logical axis -> the size of a model that a mesh's axis must divide. The vocabulary is padded instead."""


def pad_vocab(config: ModelConfig, tensor: int) -> ModelConfig:
    """Returns the model with the fewest rows of vocabulary that so many devices share evenly."""
    rows = config.padded_vocab_size
    assert rows is not None  # set by ModelConfig
    return dataclasses.replace(config, padded_vocab_size=-(-rows // tensor) * tensor)


def param_specs(config: ModelConfig, part: ModelPart | None = None) -> dict[str, PartitionSpec]:
    """Returns which mesh axis splits each dimension of each weight of a model or a part of it, by name."""
    return {
        name: PartitionSpec(*(RULES[axis] for axis in info.axes))
        for name, info in param_table(config, part).items()
    }


def param_shardings(
    config: ModelConfig, mesh: Mesh, part: ModelPart | None = None
) -> dict[str, NamedSharding]:
    """Returns where each weight lies on a mesh, by name.

    Args:
      config: The model.
      mesh: Its axis "tensor" splits the weights; over any other axis they are repeated.
      part: Only the weights of this part of the model; None means all.

    Raises:
      ConfigError: A split size is no multiple of the mesh's axis; the message lists the axes that would do.
    """
    _check_divides(config, mesh.shape["tensor"])
    return {name: NamedSharding(mesh, spec) for name, spec in param_specs(config, part).items()}


def _check_divides(config: ModelConfig, tensor: int) -> None:
    sizes = {
        _FIELDS[axis]: size
        for info in param_table(config).values()
        for axis, size in zip(info.axes, info.shape, strict=True)
        if axis in _FIELDS
    }
    common = math.gcd(*sizes.values())
    if common % tensor:
        fit = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        have = " and ".join(f"{field} {size}" for field, size in sizes.items())
        raise ConfigError(
            f"tensor must divide {' and '.join(sizes)}, got tensor {tensor} with {have}; sizes that do: {fit}"
        )
    assert config.padded_vocab_size is not None  # set by ModelConfig
    if config.padded_vocab_size % tensor:
        raise ConfigError(
            f"padded_vocab_size must be a multiple of tensor {tensor}, got {config.padded_vocab_size}; "
            f"use {pad_vocab(config, tensor).padded_vocab_size}"
        )
