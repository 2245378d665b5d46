"""Devices that are not there: programs are compiled for them, and the result is looked at.

Needs JAX's CUDA plugin and an assembler, the extra `aot`; no GPU, no driver. The process must keep JAX from
looking for either, with JAX_PLATFORMS=cpu and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 in its environment, and do
without JAX's persistent compilation cache, which cannot read such programs back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from jorca.config import ConfigError
from jorca.planning.gpus import Gpu, gpu


def make_devices(name: str, num_devices: int = 1, num_hosts: int = 1) -> list[Any]:
    """Returns devices of a kind of GPU, for meshes and shardings; nothing can run on them.

    Args:
      name: In `jorca.planning.GPUS`.
      num_devices: On each host.
      num_hosts: Hosts.

    Raises:
      ConfigError: There is no such GPU, or the extra `aot` is not installed.
    """
    try:
        description = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            topology=f"1x{num_hosts}x{num_devices}",
            target_config=_target_config(gpu(name)),
        )
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"compiling for {name} needs the compiler parts of JAX's CUDA plugin; "
            f"install them with pip install 'jorca[aot]' ({error})"
        ) from error
    return list(description.devices)


def compile_for(mesh: Mesh, lower: Callable[[], Lowered], *, optimize: bool = True) -> Compiled:
    """Lowers and compiles a program for a mesh of devices that are not there.

    Args:
      mesh: Of devices from `make_devices`.
      lower: Lowers the program for `jax.ShapeDtypeStruct`s that have shardings over the mesh, as in
        `lambda: jax.jit(f).lower(*args)`.
      optimize: Whether the machine code is optimised. If it is not, compiling takes half the time, and
        the optimised HLO is the same: memory, copies, exchanges and launches.

    Returns:
      The executable: `memory_analysis()`, `as_text()` and `cost_analysis()` tell of it.
    """
    # Pallas asks the abstract mesh which GPU it lowers for.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = lower()
    return lowered.compile(compiler_options=None if optimize else {"xla_backend_optimization_level": 0})


def _target_config(gpu: Gpu) -> str:
    """Returns XLA's GpuTargetConfigProto as text."""
    major, minor = gpu.compute_capability
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
          core_count: {gpu.num_processors}
          fpus_per_core: {gpu.lanes_per_processor}
          clock_rate_ghz: {gpu.clock_ghz}
          device_memory_size: {gpu.memory_bytes}
          memory_bandwidth: {gpu.memory_bytes_per_s:.0f}
          l2_cache_size: {gpu.l2_bytes}
          shared_memory_per_core: {gpu.shared_bytes_per_processor}
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: {gpu.shared_bytes_per_block}
          threads_per_core_limit: {gpu.threads_per_processor}
          threads_per_block_limit: 1024
          threads_per_warp: 32
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        device_description_str: "{gpu.device_kind}"
    """
