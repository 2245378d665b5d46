"""GPUs and their figures, in one table."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Final

from jorca.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One kind of GPU.

    Attributes:
      device_kind: The name that CUDA gives it.
      compute_capability: Major and minor number.
      memory_bytes: Memory that CUDA reports, before anything is allocated.
      memory_bytes_per_s: Peak bandwidth of the memory.
      flops_per_s: Peak rate of dense matrix products in bfloat16 and float16, accumulated in float32.
      num_processors: Streaming multiprocessors.
      shared_bytes_per_processor: Shared memory of a multiprocessor.
      shared_bytes_per_block: Most shared memory of a thread block, opted in.
      l2_bytes: Level-2 cache.
      clock_ghz: Highest clock of the multiprocessors.
      threads_per_processor: Most threads that a multiprocessor holds.
      lanes_per_processor: Float32 units of a multiprocessor.
      source: Where the figures are from.
    """

    device_kind: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: float
    num_processors: int
    shared_bytes_per_processor: int
    shared_bytes_per_block: int
    l2_bytes: int
    clock_ghz: float
    threads_per_processor: int
    lanes_per_processor: int
    source: str

    @property
    def compute_capability_text(self) -> str:
        """As JAX writes it, "9.0"."""
        return "{}.{}".format(*self.compute_capability)


def _ampere(device_kind: str, memory_bytes: int, memory_bytes_per_s: float) -> Gpu:
    return Gpu(
        device_kind=device_kind,
        compute_capability=(8, 0),
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        flops_per_s=312e12,
        num_processors=108,
        shared_bytes_per_processor=167_936,
        shared_bytes_per_block=166_912,
        l2_bytes=41_943_040,
        clock_ghz=1.41,
        threads_per_processor=2048,
        lanes_per_processor=64,
        source="NVIDIA A100 datasheet (2021) and deviceQuery",
    )


def _hopper(device_kind: str, memory_bytes: int, memory_bytes_per_s: float, source: str) -> Gpu:
    return Gpu(
        device_kind=device_kind,
        compute_capability=(9, 0),
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        flops_per_s=989.4e12,
        num_processors=132,
        shared_bytes_per_processor=233_472,
        shared_bytes_per_block=232_448,
        l2_bytes=52_428_800,
        clock_ghz=1.98,
        threads_per_processor=2048,
        lanes_per_processor=128,
        source=source,
    )


GPUS: Final = MappingProxyType(
    {
        "a100-40gb": _ampere("NVIDIA A100-SXM4-40GB", 42_298_834_944, 1.555e12),
        "a100-80gb": _ampere("NVIDIA A100-SXM4-80GB", 85_100_068_864, 2.039e12),
        "h100": _hopper(
            "NVIDIA H100 80GB HBM3", 84_942_979_072, 3.35e12, "NVIDIA H100 datasheet, SXM, and deviceQuery"
        ),
        "h200": _hopper("NVIDIA H200", 151_397_597_184, 4.8e12, "NVIDIA H200 datasheet and deviceQuery"),
        "l4": Gpu(
            device_kind="NVIDIA L4",
            compute_capability=(8, 9),
            memory_bytes=23_670_554_624,
            memory_bytes_per_s=300e9,
            flops_per_s=121e12,
            num_processors=58,
            shared_bytes_per_processor=102_400,
            shared_bytes_per_block=101_376,
            l2_bytes=50_331_648,
            clock_ghz=2.04,
            threads_per_processor=1536,
            lanes_per_processor=128,
            source="NVIDIA L4 datasheet, half of the rate with sparsity, and deviceQuery",
        ),
        "a10g": Gpu(
            device_kind="NVIDIA A10G",
            compute_capability=(8, 6),
            memory_bytes=23_826_792_448,
            memory_bytes_per_s=600e9,
            flops_per_s=70e12,
            num_processors=80,
            shared_bytes_per_processor=102_400,
            shared_bytes_per_block=101_376,
            l2_bytes=6_291_456,
            clock_ghz=1.71,
            threads_per_processor=1536,
            lanes_per_processor=128,
            source="NVIDIA A10G datasheet; the memory is what PyTorch reports on AWS G5, 22.19 GiB",
        ),
        "b200": Gpu(
            device_kind="NVIDIA B200",
            compute_capability=(10, 0),
            memory_bytes=191_514_411_008,
            memory_bytes_per_s=7.7e12,
            flops_per_s=2250e12,
            num_processors=148,
            shared_bytes_per_processor=233_472,
            shared_bytes_per_block=232_448,
            l2_bytes=132_644_864,
            clock_ghz=1.965,
            threads_per_processor=2048,
            lanes_per_processor=128,
            source="NVIDIA Blackwell datasheet (HGX B200), half of the rate with sparsity, and deviceQuery",
        ),
    }
)
"""By name. Threads and shared memory are those of the CUDA programming guide's table by capability."""


def gpu(name: str) -> Gpu:
    """Returns the GPU of that name; raises ConfigError, listing the names, if there is none."""
    try:
        return GPUS[name]
    except KeyError:
        raise ConfigError(f"gpu must be one of {', '.join(GPUS)}, got {name!r}") from None
