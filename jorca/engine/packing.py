"""Laying an iteration out for the device: one small int32 buffer, read back inside the program.

Everything that a step needs from the host (tokens, positions, page tables, sampling) goes over in a
single transfer. The buffer is a fresh array for each iteration, because JAX may read a host array after
the call that took it has returned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jorca.attention import AttentionMetadata
from jorca.engine.buckets import Bucket, BucketLadder
from jorca.model.sampling import RowSampling
from jorca.request import SamplingParams
from jorca.scheduler import Iteration

_RECORD = 7  # temperature, top_k, top_p, min_p, seed (high, low), logprobs wanted


def sampling_record(params: SamplingParams) -> np.ndarray:
    """Returns a request's sampling as int32 [7], floats by their bits; made once per request.

    Args:
      params: With its seed set.
    """
    assert params.seed is not None, "a request gets its seed when it is submitted"
    floats = np.array([params.temperature, params.top_p, params.min_p], np.float32).view(np.int32)
    record = np.empty(_RECORD, np.int32)
    record[[0, 2, 3]] = floats
    record[1] = params.top_k
    record[4:6] = np.array([params.seed >> 32, params.seed & 0xFFFFFFFF], np.uint32).view(np.int32)
    record[6] = params.logprobs is not None
    return record


@dataclasses.dataclass(frozen=True, slots=True)
class PackedBatch:
    """An iteration laid out for the device.

    Attributes:
      iteration: What it was made from.
      bucket: The shape it was padded to.
      buffer: Int32, one dimension; see `Layout`.
      wants_logprobs: Whether any of its requests wants log-probabilities.
    """

    iteration: Iteration
    bucket: Bucket
    buffer: np.ndarray
    wants_logprobs: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """The buffer's contents, inside the program.

    Attributes:
      token_ids_t: At least 0: the token; below 0: the last token of device row -1 - value.
      positions_t: Position in its own sequence; 0 for padding.
      metadata: For attention.
      logits_row_r: Flat row whose logits are needed; 0 for padding.
      device_row_r: Row of the per-request state; `max_running` for padding.
      sampling: For the sampler; padding is greedy.
      wants_logprobs: Whether any row wants log-probabilities.
    """

    token_ids_t: Int[Array, " T"]
    positions_t: Int[Array, " T"]
    metadata: AttentionMetadata
    logits_row_r: Int[Array, " R"]
    device_row_r: Int[Array, " R"]
    sampling: RowSampling
    wants_logprobs: Array


class Layout:
    """Where each part of a bucket's buffer lies; written by `Packer`, read by `unpack`."""

    def __init__(self, bucket: Bucket):
        self.bucket = bucket
        t, r, m = bucket.num_tokens, bucket.num_rows, bucket.max_pages
        shapes = {
            "token_ids": (t,),
            "positions": (t,),
            "first_row": (r,),
            "num_rows": (r,),
            "kv_len": (r,),
            "pages": (r, m),
            "logits_row": (r,),
            "device_row": (r,),
            "position": (r,),
            "sampling": (r, _RECORD),
        }
        self._parts: dict[str, tuple[slice, tuple[int, ...]]] = {}
        at = 0
        for name, shape in shapes.items():
            self._parts[name] = slice(at, at + math.prod(shape)), shape
            at += math.prod(shape)
        self.size = at

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Returns a writable view of each part by name."""
        return {name: buffer[part].reshape(shape) for name, (part, shape) in self._parts.items()}

    def unpack(self, buffer: Int[Array, " size"]) -> StepInputs:
        """Reads the buffer inside a traced program."""

        def get(name: str) -> jax.Array:
            part, shape = self._parts[name]
            return buffer[part].reshape(shape)

        def as_float(bits: jax.Array) -> jax.Array:
            return jax.lax.bitcast_convert_type(bits, jnp.float32)

        record = get("sampling")
        sampling = RowSampling(
            temperature_r=as_float(record[:, 0]),
            top_k_r=record[:, 1],
            top_p_r=as_float(record[:, 2]),
            min_p_r=as_float(record[:, 3]),
            seed_r2=jax.lax.bitcast_convert_type(record[:, 4:6], jnp.uint32),
            position_r=get("position"),
        )
        metadata = AttentionMetadata(get("first_row"), get("num_rows"), get("kv_len"), get("pages"))
        return StepInputs(
            token_ids_t=get("token_ids"),
            positions_t=get("positions"),
            metadata=metadata,
            logits_row_r=get("logits_row"),
            device_row_r=get("device_row"),
            sampling=sampling,
            wants_logprobs=(record[:, 6] != 0).any(),
        )


class Packer:
    """Turns iterations into packed batches.

    Args:
      ladder: The buckets.
      num_pages: Pages in all; marks unused page table entries.
    """

    def __init__(self, ladder: BucketLadder, num_pages: int):
        self._ladder = ladder
        self._num_pages = num_pages
        self._layouts = {bucket: Layout(bucket) for bucket in ladder.buckets}

    def pack(self, iteration: Iteration, records: Mapping[str, np.ndarray]) -> PackedBatch:
        """Lays the items end to end and pads them to the smallest bucket.

        Args:
          iteration: What runs.
          records: `sampling_record` of each request in it, by id.
        """
        bucket = self._ladder.bucket_for(iteration.num_tokens)
        layout = self._layouts[bucket]
        buffer = np.zeros(layout.size, np.int32)
        part = layout.views(buffer)
        part["pages"].fill(self._num_pages)
        part["device_row"].fill(bucket.max_running)
        tokens, positions, at, row = part["token_ids"], part["positions"], 0, 0
        for slot, item in enumerate(iteration.items):
            end = at + item.num_tokens
            tokens[at:end] = -1 - item.row if item.token_ids is None else item.token_ids
            positions[at:end] = range(item.start, item.end) if item.num_tokens > 1 else item.start
            part["first_row"][slot] = at
            part["num_rows"][slot] = item.num_tokens
            part["kv_len"][slot] = item.end
            part["pages"][slot, : len(item.pages)] = item.pages
            at = end
            if item.num_logits:
                part["logits_row"][row] = at - 1
                part["device_row"][row] = item.row
                part["position"][row] = item.end
                part["sampling"][row] = records[item.request_id]
                row += 1
        part["first_row"][len(iteration.items) :] = at
        return PackedBatch(iteration, bucket, buffer, bool(part["sampling"][:, 6].any()))
