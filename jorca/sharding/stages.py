"""Pipeline stages: which layers run on which devices."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jorca.config import ConfigError, MeshConfig, ModelConfig
from jorca.model.params import ModelPart
from jorca.sharding.rules import KV_ARRAY, param_shardings


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage: a part of the model on a mesh of its own.

    Attributes:
      index: From 0, in the order in which an iteration passes the stages.
      part: What it holds of the model.
      mesh: Its devices, along the one axis "tensor".
    """

    index: int
    part: ModelPart
    mesh: Mesh

    @property
    def whole(self) -> NamedSharding:
        """Every device holds all of an array: what goes between host and stages, and between stages."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def by_heads(self) -> NamedSharding:
        """The KV array [L, P, N_kv, S, H]: every device holds its heads of every page."""
        return NamedSharding(self.mesh, KV_ARRAY)

    def param_shardings(self, config: ModelConfig) -> dict[str, NamedSharding]:
        """Returns where each weight of this stage lies, by name."""
        return param_shardings(config, self.mesh, self.part)


def make_stages(
    model: ModelConfig, config: MeshConfig, devices: Sequence[Any] | None = None
) -> tuple[Stage, ...]:
    """Lays a model out over devices: Q stages of K devices each, neighbours together.

    Args:
      model: The model.
      config: How many stages and how many devices in each.
      devices: What to use, in order; None takes JAX's. Those behind the first Q * K stay idle.

    Raises:
      ConfigError: There are too few devices, or fewer layers than stages.
    """
    devices = jax.devices() if devices is None else list(devices)
    needed = config.stages * config.tensor
    if needed > len(devices):
        raise ConfigError(
            f"stages * tensor must be at most the {len(devices)} devices that there are, "
            f"got {config.stages} * {config.tensor}"
        )
    grid = np.array(devices[:needed], dtype=object).reshape(config.stages, config.tensor)
    last = config.stages - 1
    return tuple(
        Stage(index, ModelPart(layers, index == 0, index == last), Mesh(grid[index], ("tensor",)))
        for index, layers in enumerate(spread_layers(model.num_layers, config.stages))
    )


def spread_layers(num_layers: int, num_stages: int) -> list[range]:
    """Returns the layers of each stage: evenly, and where that does not go the first stages have one more.

    The last stage has the head to compute as well.

    Raises:
      ConfigError: There are fewer layers than stages.
    """
    if num_stages > num_layers:
        raise ConfigError(f"stages must be at most the model's {num_layers} layers, got {num_stages}")
    each, more = divmod(num_layers, num_stages)
    bounds = [stage * each + min(stage, more) for stage in range(num_stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]
