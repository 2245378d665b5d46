"""Laying an iteration out for the device: one small int32 buffer, read back inside the program; no JAX.

Everything that a step needs from the host (tokens, positions, page tables, sampling) goes over in a
single transfer. The buffer is a fresh array for each iteration, because JAX may read a host array after
the call that took it has returned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jorca.engine.buckets import Bucket, BucketLadder
from jorca.engine.records import FIELDS, GREEDY, RequestRecord, RowLists
from jorca.scheduler import Item, Iteration


@dataclasses.dataclass(frozen=True, slots=True)
class PackedBatch:
    """An iteration laid out for the device.

    Attributes:
      iteration: What it was made from.
      bucket: The shape it was padded to.
      buffer: Int32, one dimension; see `Layout`.
      target_r: For each row of logits the prompt token that follows it, whose log-probability is
        wanted; -1 where a token is sampled. A view of the buffer.
      wants_logprobs: Whether any row wants log-probabilities.
      admitted: Rows that are given to requests with lists, which go into the device state before the step.
    """

    iteration: Iteration
    bucket: Bucket
    buffer: np.ndarray
    target_r: np.ndarray
    wants_logprobs: bool
    admitted: tuple[tuple[int, RowLists], ...]


class Layout:
    """Where each part of a bucket's buffer lies: for `BucketPacker` and for `jorca.engine.step.unpack`."""

    def __init__(self, bucket: Bucket):
        t, r, m = bucket.num_tokens, bucket.num_rows, bucket.max_pages
        shapes = {
            "token_ids": (t,),
            "positions": (t,),
            "token_row": (t,),
            "first_row": (r,),
            "num_rows": (r,),
            "kv_len": (r,),
            "pages": (r, m),
            "logits_row": (r,),
            "target": (r,),
            "device_row": (r,),
            "position": (r,),
            "record": (r, len(FIELDS)),
            "wants_logprobs": (1,),
        }
        self._parts: dict[str, tuple[slice, tuple[int, ...]]] = {}
        at = 0
        for name, shape in shapes.items():
            self._parts[name] = slice(at, at + math.prod(shape)), shape
            at += math.prod(shape)
        self.size = at

    def views(self, buffer: Any) -> dict[str, Any]:
        """Returns each part of a buffer by name: writable views of a NumPy array, parts of a traced one."""
        return {name: buffer[part].reshape(shape) for name, (part, shape) in self._parts.items()}


class BucketPacker:
    """Turns iterations into packed batches: the `Packer` of executors that run compiled steps.

    Args:
      ladder: The buckets.
      num_pages: Pages in all; marks unused page table entries.
    """

    def __init__(self, ladder: BucketLadder, num_pages: int):
        self._ladder = ladder
        self._num_pages = num_pages
        self._layouts = {bucket: Layout(bucket) for bucket in ladder.buckets}

    def pack(self, iteration: Iteration, records: Mapping[str, RequestRecord]) -> PackedBatch:
        """Lays the items end to end and pads them to the smallest bucket.

        Args:
          iteration: What runs.
          records: The record of each request in it, those that it admits included, by id.
        """
        bucket = self._ladder.bucket_for(iteration.num_tokens)
        layout = self._layouts[bucket]
        buffer = np.zeros(layout.size, np.int32)
        part = layout.views(buffer)
        part["pages"].fill(self._num_pages)
        part["token_row"].fill(bucket.max_running)
        part["device_row"].fill(bucket.max_running)
        part["record"][:] = GREEDY
        part["target"].fill(-1)
        at = row = 0
        for slot, item in enumerate(iteration.items):
            record = records[item.request_id]
            _pack_tokens(part, slot, at, item)
            at += item.num_tokens
            row += _pack_logits(part, row, at, item, record)
        part["first_row"][len(iteration.items) :] = at
        wants_logprobs = any(
            item.num_logits and (record.wants_logprobs or record.wants_prompt_logprobs)
            for item in iteration.items
            for record in (records[item.request_id],)
        )
        part["wants_logprobs"][0] = wants_logprobs
        admitted = tuple(
            (admission.row, lists)
            for admission in iteration.admitted
            if (lists := records[admission.request_id].lists) is not None
        )
        return PackedBatch(iteration, bucket, buffer, part["target"], wants_logprobs, admitted)


def _pack_tokens(part: Mapping[str, np.ndarray], slot: int, at: int, item: Item) -> None:
    """Writes what an item feeds, from flat row `at` on."""
    end = at + item.num_tokens
    part["token_ids"][at:end] = -1 if item.token_ids is None else item.token_ids
    part["positions"][at:end] = range(item.start, item.end) if item.num_tokens > 1 else item.start
    part["token_row"][at:end] = item.row
    part["first_row"][slot] = at
    part["num_rows"][slot] = item.num_tokens
    part["kv_len"][slot] = item.end
    part["pages"][slot, : len(item.pages)] = item.pages


def _pack_logits(
    part: Mapping[str, np.ndarray], row: int, end: int, item: Item, record: RequestRecord
) -> int:
    """Writes which of an item's rows need logits, the last ones before flat row `end`; returns how many."""
    num_rows, prompt_ids = item.num_logits, record.prompt_ids
    for i in range(num_rows):
        position = item.end - num_rows + i + 1
        part["logits_row"][row + i] = end - num_rows + i
        part["position"][row + i] = position
        if position < len(prompt_ids):
            part["target"][row + i] = prompt_ids[position]
        else:
            part["device_row"][row + i] = item.row
            part["record"][row + i] = record.sampling
    return num_rows
