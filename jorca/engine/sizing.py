"""From configs to plain numbers: a scheduler's limits, the buckets, the size of the KV array; no JAX."""

from __future__ import annotations

import dataclasses
from typing import Final

from jorca.config import DTYPE_BYTES, BucketConfig, ConfigError, EngineConfig, ModelConfig
from jorca.engine.buckets import BucketLadder
from jorca.engine.packing import BucketPacker
from jorca.scheduler import SchedulerLimits

KV_SHARE: Final = 0.9
"""Share of a device's free memory that the KV array may take; the rest is left to workspaces."""
CPU_KV_BYTES: Final = 4 * 2**30
"""Most bytes of KV array where the device does not tell its memory (CPU)."""
SAMPLER_ARRAYS: Final = 7
"""Float32 arrays in the shape of the logits that a step needs to choose tokens: compiled for an A100 and an
H200, a step of 64 rows and 50,257 tokens takes 82.9 MiB of scratch, 6.8 of them (docs/kernels.md)."""
_MIN_ROWS: Final = 64
"""From so many rows on, matrix products gave a row the same bits at every width and dtype measured."""
_MIN_NUMBERS: Final = 4096
"""From so many numbers in all on, XLA's CPU compiler sums each row in the same order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What the parts of an engine agree on.

    Attributes:
      limits: What the scheduler may emit.
      ladder: The buckets that hold it.
    """

    limits: SchedulerLimits
    ladder: BucketLadder

    def packer(self) -> BucketPacker:
        """Returns a packer for these buckets and pages."""
        return BucketPacker(self.ladder, self.limits.num_pages)


def derive_sizes(model: ModelConfig, config: EngineConfig, free_bytes: int | None = None) -> Sizes:
    """Returns the sizes of an engine: the one place where they come from.

    Args:
      model: The model to serve.
      config: The engine's options.
      free_bytes: Device memory left once weights are loaded; None where the device does not say.

    Raises:
      ConfigError: The KV array would not hold a single page.
    """
    limits = resolve_limits(model, config, free_bytes)
    floor = smallest_bucket(model, config.buckets) if config.deterministic else None
    return Sizes(limits, BucketLadder(limits, config.buckets, floor=floor))


def sampler_bytes(model: ModelConfig, max_batch_size: int, tensor: int) -> int:
    """Returns the bytes of scratch that a step needs on a device to choose tokens.

    Args:
      model: The model.
      max_batch_size: Rows of logits, at least 1.
      tensor: Devices that share each row, at least 1.
    """
    return SAMPLER_ARRAYS * max_batch_size * -(-model.vocab_size // tensor) * DTYPE_BYTES["float32"]


def kv_budget_bytes(free_bytes: int | None, scratch_bytes: int = 0) -> int:
    """Returns the bytes that the KV array may take by default.

    Args:
      free_bytes: What the device has left once weights are loaded; None where it does not say.
      scratch_bytes: What is known to be needed besides.
    """
    return CPU_KV_BYTES if free_bytes is None else max(0, int((free_bytes - scratch_bytes) * KV_SHARE))


def resolve_limits(
    model: ModelConfig, config: EngineConfig, free_bytes: int | None = None
) -> SchedulerLimits:
    """Fills every size that the configs leave open.

    Args:
      model: The model to serve.
      config: The engine's options.
      free_bytes: Device memory left once weights are loaded; None where the device does not say.

    Returns:
      The limits of the scheduler, all plain ints.

    Raises:
      ConfigError: The KV array would not hold a single page.
    """
    scheduler, cache = config.scheduler, config.cache
    max_batch_tokens = scheduler.max_batch_tokens
    if max_batch_tokens is None:
        largest = max(2048, model.max_positions)
        max_batch_tokens = min(scheduler.max_batch_size * model.max_positions, largest)
    max_in_flight = scheduler.max_in_flight or config.mesh.stages
    pages_per_request = -(-model.max_positions // cache.page_size)
    page_bytes = model.kv_spec.bytes_per_page(cache.page_size)
    # The first stage has the most layers; what its devices have room for, the others have too.
    most_layers = -(-model.num_layers // config.mesh.stages)
    on_device = model.kv_spec.part(most_layers, config.mesh.tensor)
    device_page_bytes = on_device.bytes_per_page(cache.page_size)
    num_pages = cache.num_pages
    if num_pages is None and cache.kv_memory_bytes is not None:
        num_pages = cache.kv_memory_bytes // page_bytes
        if num_pages == 0:
            raise ConfigError(
                f"kv_memory_bytes must hold at least one page of {page_bytes} bytes, "
                f"got {cache.kv_memory_bytes}; raise it or lower page_size"
            )
    if num_pages is None:
        wanted = scheduler.max_batch_size * max_in_flight * pages_per_request
        scratch_bytes = sampler_bytes(model, scheduler.max_batch_size, config.mesh.tensor)
        num_pages = min(wanted, kv_budget_bytes(free_bytes, scratch_bytes) // device_page_bytes)
        if num_pages == 0:
            raise ConfigError(
                f"no memory is left for a KV page of {device_page_bytes} bytes on a device; "
                "lower page_size or max_batch_size, or set kv_memory_bytes"
            )
    return SchedulerLimits(
        max_batch_size=scheduler.max_batch_size,
        max_batch_tokens=max_batch_tokens,
        max_in_flight=max_in_flight,
        num_pages=num_pages,
        page_size=cache.page_size,
        max_positions=model.max_positions,
    )


def smallest_bucket(model: ModelConfig, config: BucketConfig) -> int:
    """Returns the rows to a multiple of which every batch of a deterministic engine is padded.

    That is `min_bucket` if it is set. The default is a power of two that was safe wherever it was measured;
    the probe has the last word.
    """
    if config.min_bucket is not None:
        return config.min_bucket
    width = min(model.d_model, model.vocab_size)  # norms sum over the one, log-probabilities over the other
    rows = -(-_MIN_NUMBERS // width)
    return max(_MIN_ROWS, 1 << (rows - 1).bit_length())
