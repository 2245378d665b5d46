"""What travels between processes for each iteration, as plain values, and digests that show who diverges."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import jorca
from jorca.config import EngineConfig, ModelConfig
from jorca.engine.buckets import BucketLadder
from jorca.engine.executor import Outputs
from jorca.engine.packing import Layout, PackedBatch
from jorca.engine.records import RowLists
from jorca.scheduler import Iteration

_OWN_OPTIONS = ("hosts", "seed", "compilation_cache_dir", "max_failures")
"""Engine options that may differ between processes."""


def group_facts(model: ModelConfig, config: EngineConfig) -> dict[str, Any]:
    """Returns what must be the same in all processes, by name: versions, the model, the engine's options."""
    options = {k: v for k, v in dataclasses.asdict(config).items() if k not in _OWN_OPTIONS}
    return {
        "jorca": jorca.__version__,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "num_processes": jax.process_count(),
        **_flat("model", dataclasses.asdict(model)),
        **_flat("engine", options),
    }


def _flat(prefix: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}.{name}"
        flat |= _flat(key, value) if isinstance(value, dict) else {key: value}
    return flat


def batch_to_plain(packed: PackedBatch) -> dict[str, Any]:
    """Returns a packed iteration as plain values."""
    return {
        "iteration": packed.iteration.to_dict(),
        "buffer": packed.buffer.tobytes(),
        "num_tokens": packed.bucket.num_tokens,
        "wants_logprobs": packed.wants_logprobs,
        "admitted": [
            [row, [_array_to_plain(getattr(lists, field.name)) for field in dataclasses.fields(lists)]]
            for row, lists in packed.admitted
        ],
    }


def batch_from_plain(data: Mapping[str, Any], ladder: BucketLadder) -> PackedBatch:
    """Inverse of `batch_to_plain`; `ladder` has the bucket that it was packed for."""
    bucket = ladder.bucket_for(data["num_tokens"])
    buffer = np.frombuffer(data["buffer"], np.int32)
    return PackedBatch(
        iteration=Iteration.from_dict(data["iteration"]),
        bucket=bucket,
        buffer=buffer,
        target_r=Layout(bucket).views(buffer)["target"],
        wants_logprobs=data["wants_logprobs"],
        admitted=tuple((row, RowLists(*map(_array_from_plain, lists))) for row, lists in data["admitted"]),
    )


def outputs_to_plain(outputs: Outputs) -> dict[str, Any]:
    """Returns outputs as plain values."""
    return {name: _array_to_plain(x) for name, x in outputs.items()}


def outputs_from_plain(data: Mapping[str, Any]) -> Outputs:
    """Inverse of `outputs_to_plain`."""
    return {name: _array_from_plain(x) for name, x in data.items()}


def _array_to_plain(x: np.ndarray) -> list[Any]:
    return [x.dtype.str, list(x.shape), x.tobytes()]


def _array_from_plain(data: list[Any]) -> np.ndarray:
    dtype, shape, content = data
    return np.frombuffer(content, dtype).reshape(shape)


class RunningDigest:
    """A digest of all iterations so far: once two of them differ, they do so for ever."""

    def __init__(self):
        self._digest = b""

    def add_plan(self, packed: PackedBatch) -> bytes:
        """Takes in what runs; returns the digest."""
        lists = (x for row in packed.admitted for x in dataclasses.astuple(row[1]))
        return self._add(packed.iteration.seq, packed.buffer, *lists)

    def add_tokens(self, seq: int, outputs: Outputs) -> bytes:
        """Takes in what was sampled; returns the digest."""
        return self._add(seq, outputs["tokens_r2"])

    def _add(self, seq: int, *arrays: np.ndarray) -> bytes:
        digest = hashlib.sha256(self._digest + seq.to_bytes(8, "big"))
        for array in arrays:
            digest.update(np.ascontiguousarray(array).data)
        self._digest = digest.digest()
        return self._digest
