"""Compiling one program per bucket before the first request arrives."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jorca.attention import Attention, KVCache
from jorca.config import ModelConfig
from jorca.engine.buckets import Bucket, BucketLadder
from jorca.engine.packing import Layout
from jorca.engine.step import make_step
from jorca.model.adjust import RowState, write_lists

_logger = logging.getLogger(__name__)

_CPU_ROW_BLOCK = 4  # measured by benchmarks/sampling.py: more would make one sampled row pay for many


@dataclasses.dataclass(frozen=True, slots=True)
class Programs:
    """Everything that the executor calls.

    Attributes:
      compiled: The executable of each bucket. It takes arrays of exactly its shapes and raises for others, so
        nothing is ever compiled in front of a request.
      write_lists: The executable of `jorca.model.adjust.write_lists`.
    """

    compiled: Mapping[Bucket, Any]
    write_lists: Any


def compile_programs(
    config: ModelConfig,
    ladder: BucketLadder,
    attention: Attention,
    params: Mapping[str, Any],
    cache: KVCache,
    state: RowState,
    *,
    return_logits: bool = False,
    show_progress: bool = False,
) -> Programs:
    """Lowers and compiles the step of every bucket, on as many threads as there are cores.

    Args:
      config: The model.
      ladder: The buckets.
      attention: The attention implementation.
      params: Weights by name; only shapes, dtypes and shardings are read.
      cache: The KV array, likewise.
      state: The per-row state, likewise.
      return_logits: Whether steps return their logits.
      show_progress: Whether to draw a progress bar on standard error.
    """
    started = time.perf_counter()
    abstract = jax.tree.map(_abstract, (params, cache, state))
    platform = next(iter(cache.keys_lpnsh.devices())).platform
    compiled: dict[Bucket, Any] = {}
    with (
        progress_bar(show_progress) as progress,
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        task = progress.add_task("compiling", total=len(ladder.buckets))
        futures: dict[concurrent.futures.Future[Any], Bucket] = {}
        for bucket in ladder.buckets:
            row_block = min(_CPU_ROW_BLOCK, bucket.num_rows) if platform == "cpu" else bucket.num_rows
            step = make_step(config, bucket, attention, row_block=row_block, return_logits=return_logits)
            buffer = jax.ShapeDtypeStruct((Layout(bucket).size,), jnp.int32)
            lowered = jax.jit(step, donate_argnums=(1, 2)).lower(*abstract, buffer)
            futures[pool.submit(lowered.compile)] = bucket
        for future in concurrent.futures.as_completed(futures):
            compiled[futures[future]] = future.result()
            progress.advance(task)
    seconds = time.perf_counter() - started
    temp_bytes = max(program.memory_analysis().temp_size_in_bytes for program in compiled.values())
    _logger.info(
        "%d programs for %s tokens in %.1f s; KV array %d bytes, scratch at most %d bytes per device",
        len(compiled), [b.num_tokens for b in ladder.buckets], seconds, cache.nbytes, temp_bytes,
    )  # fmt: skip
    return Programs(compiled, _compile_write_lists(abstract[2]))


def _compile_write_lists(state: RowState) -> Any:
    row = jax.ShapeDtypeStruct((), jnp.int32)
    lists = (state.bias_ids_nk, state.bias_nk, state.banned_ids_nk)
    shapes = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in lists)
    return jax.jit(write_lists, donate_argnums=0).lower(state, row, *shapes).compile()


def use_compilation_cache(folder: str) -> None:
    """Makes JAX keep compiled programs in a folder, so that the next start finds them there.

    This is a setting of the whole process. Changes it only if the folder is another than before.

    Args:
      folder: Created if it does not exist.
    """
    if jax.config.jax_compilation_cache_dir == folder:
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    # A small model's programs compile in less than JAX's threshold of a second, but there are many.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # JAX looks at the folder once, at the first thing that it compiles; have it look again.
    compilation_cache.reset_cache()


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def progress_bar(show: bool) -> Progress:
    """Returns a bar on standard error, or one that draws nothing."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not show)
