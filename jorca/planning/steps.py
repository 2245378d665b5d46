"""The engine's own steps, compiled for meshes that are not there."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax

from jorca.attention import choose_attention, get_attention
from jorca.config import MeshConfig, ModelConfig
from jorca.engine.buckets import Bucket
from jorca.engine.programs import StageArrays, lower_step
from jorca.planning.topology import compile_for, make_devices
from jorca.sharding import Stage, make_stages, pad_vocab


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledStep:
    """The step of one stage and bucket.

    Attributes:
      stage: Which part of the model runs on which devices.
      held: What the stage keeps there, as shapes.
      attention: The attention that it runs.
      program: The executable. `memory_analysis()` tells of its bytes; of copies, exchanges and launches
        `read_operations(program.as_text())`.
    """

    stage: Stage
    held: StageArrays
    attention: str
    program: Any

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on each device."""
        return _device_bytes(self.held.params)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV array on each device."""
        return _device_bytes(self.held.cache)

    @property
    def state_bytes(self) -> int:
        """Bytes of the last stage's state on each device; 0 for the other stages."""
        return _device_bytes(self.held.state)

    @property
    def scratch_bytes(self) -> int:
        """Bytes on each device that the program needs while it runs."""
        return self.program.memory_analysis().temp_size_in_bytes


def compile_steps(
    model: ModelConfig,
    mesh: MeshConfig,
    gpu: str,
    bucket: Bucket,
    *,
    num_pages: int,
    page_size: int,
    attention: str = "auto",
    optimize: bool = True,
) -> tuple[CompiledStep, ...]:
    """Compiles what an engine would run on a mesh, a program for each stage; allocates nothing.

    The process is set up as `jorca.planning.topology` says. Each stage is a host.

    Args:
      model: Any model; its vocabulary is padded for the mesh as the engine does.
      mesh: Stages, and devices of each.
      gpu: In `jorca.planning.GPUS`.
      bucket: The shape of the batch.
      num_pages: Pages of the KV array, P.
      page_size: Token positions in a page, S.
      attention: As in `EngineConfig`.
      optimize: See `compile_for`.

    Raises:
      ConfigError: There is no such GPU, the mesh does not fit the model, or the attention does not run.
    """
    model = pad_vocab(model, mesh.tensor)
    stages = make_stages(model, mesh, make_devices(gpu, mesh.tensor, mesh.stages))
    spec = model.kv_spec
    name, _ = choose_attention(
        attention,
        stages[0].mesh.devices.flat[0],
        page_size=page_size,
        head_dim=spec.head_dim,
        dtype=spec.dtype,
        group_size=model.num_heads // spec.num_kv_heads,
    )
    sizes = {"num_pages": num_pages, "page_size": page_size, "max_running": bucket.max_running}
    steps = []
    for stage in stages:
        held = StageArrays.abstract(model, stage, **sizes)
        lower = functools.partial(lower_step, model, stage, held, bucket, get_attention(name))
        steps.append(CompiledStep(stage, held, name, compile_for(stage.mesh, lower, optimize=optimize)))
    return tuple(steps)


def _device_bytes(arrays: Any) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arrays))
