"""Compiling one program per stage and bucket before the first request arrives."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Sharding
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jorca.attention import Attention, KVCache
from jorca.config import ModelConfig
from jorca.engine.buckets import Bucket, BucketLadder
from jorca.engine.packing import Layout
from jorca.engine.step import make_step
from jorca.model.adjust import RowState, write_lists
from jorca.model.params import param_table
from jorca.sharding import AttentionByHeads, Stage
from jorca.sharding.transfer import place

_logger = logging.getLogger(__name__)

_CPU_ROW_BLOCK = 4  # measured by benchmarks/sampling.py: more would make one sampled row pay for many


@dataclasses.dataclass(frozen=True, slots=True)
class StageArrays:
    """What a stage keeps on its devices.

    Attributes:
      params: Its weights by name.
      cache: Its layers' KV array; donated to every step.
      state: The last stage's state of each row, None for the others; likewise.
    """

    params: Mapping[str, Any]
    cache: KVCache
    state: RowState | None

    @classmethod
    def allocate(
        cls,
        model: ModelConfig,
        stage: Stage,
        params: Mapping[str, Any],
        *,
        num_pages: int,
        page_size: int,
        max_running: int,
    ) -> Self:
        """Allocates what a stage keeps beside its weights, zeroed.

        Args:
          model: The model, its vocabulary padded for the mesh.
          stage: Which part of it runs where.
          params: The part's weights, where they shall lie.
          num_pages: Pages of the KV array, P.
          page_size: Token positions in a page, S.
          max_running: Rows of the last stage's state.
        """
        cache, state = _zeros(model, stage, num_pages, page_size, max_running)
        return cls(params, cache, jax.tree.map(lambda x: place(x, stage.whole), state))

    @classmethod
    def abstract(
        cls, model: ModelConfig, stage: Stage, *, num_pages: int, page_size: int, max_running: int
    ) -> Self:
        """Returns what a stage keeps as shapes, dtypes and shardings; for the arguments see `allocate`.

        Nothing is allocated, and the stage's devices need not be there.
        """
        shardings = stage.param_shardings(model)
        cache, state = jax.eval_shape(lambda: _zeros(model, stage, num_pages, page_size, max_running))
        return cls(
            {
                name: jax.ShapeDtypeStruct(info.shape, jnp.dtype(info.dtype), sharding=shardings[name])
                for name, info in param_table(model, stage.part).items()
            },
            jax.tree.map(lambda x: _abstract(x, stage.by_heads), cache),
            jax.tree.map(lambda x: _abstract(x, stage.whole), state),
        )


def _zeros(
    model: ModelConfig, stage: Stage, num_pages: int, page_size: int, max_running: int
) -> tuple[KVCache, RowState | None]:
    """Returns a stage's KV array in place, and the last stage's state on the default device."""
    spec = model.kv_spec.part(len(stage.part.layers))
    cache = KVCache.allocate(spec, num_pages=num_pages, page_size=page_size, sharding=stage.by_heads)
    return cache, RowState.allocate(max_running, model.max_positions) if stage.part.has_head else None


@dataclasses.dataclass(frozen=True, slots=True)
class StagePrograms:
    """Everything that is called on a stage.

    Attributes:
      steps: The executable of each bucket. It takes arrays of exactly its shapes and raises for others, so
        nothing is ever compiled in front of a request.
      write_lists: The executable of `jorca.model.adjust.write_lists`, for the last stage.
    """

    steps: Mapping[Bucket, Any]
    write_lists: Any = None


def compile_programs(
    config: ModelConfig,
    stages: Sequence[Stage],
    arrays: Sequence[StageArrays],
    ladder: BucketLadder,
    attention: Attention,
    *,
    return_logits: bool = False,
    show_progress: bool = False,
) -> tuple[StagePrograms, ...]:
    """Lowers and compiles the step of every stage and bucket, on as many threads as there are cores.

    Args:
      config: The model.
      stages: Where its parts run.
      arrays: Of each stage; only shapes, dtypes and shardings are read.
      ladder: The buckets.
      attention: The attention implementation.
      return_logits: Whether steps return their logits.
      show_progress: Whether to draw a progress bar on standard error.
    """
    started = time.perf_counter()
    steps: dict[int, dict[Bucket, Any]] = {stage.index: {} for stage in stages}
    with (
        progress_bar(show_progress) as progress,
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        task = progress.add_task("compiling", total=len(stages) * len(ladder.buckets))
        futures: dict[concurrent.futures.Future[Any], tuple[Stage, Bucket]] = {}
        for stage, held in zip(stages, arrays, strict=True):
            for bucket in ladder.buckets:
                lowered = lower_step(config, stage, held, bucket, attention, return_logits=return_logits)
                futures[pool.submit(lowered.compile)] = stage, bucket
        for future in concurrent.futures.as_completed(futures):
            stage, bucket = futures[future]
            steps[stage.index][bucket] = future.result()
            progress.advance(task)
    seconds = time.perf_counter() - started
    temp_bytes = max(p.memory_analysis().temp_size_in_bytes for of in steps.values() for p in of.values())
    _logger.info(
        "%d programs for %s tokens in %.1f s; KV array %d bytes, scratch at most %d bytes per device",
        len(futures), [b.num_tokens for b in ladder.buckets], seconds,
        sum(held.cache.nbytes for held in arrays), temp_bytes,
    )  # fmt: skip
    return tuple(
        StagePrograms(of_stage, None if held.state is None else _compile_write_lists(held.state))
        for of_stage, held in zip(steps.values(), arrays, strict=True)
    )


def lower_step(
    config: ModelConfig,
    stage: Stage,
    held: StageArrays,
    bucket: Bucket,
    attention: Attention,
    *,
    return_logits: bool = False,
) -> Any:
    """Lowers the step of one stage and bucket. All but weights and KV array is whole on every device.

    Args:
      config: The model.
      stage: Where the part of it runs.
      held: What the stage keeps, real or abstract; only shapes, dtypes and shardings are read.
      bucket: The shape of the batch.
      attention: The implementation; on several devices each runs it with its own heads.
      return_logits: Whether the step returns its logits.

    Returns:
      A `jax.stages.Lowered` of `jorca.engine.step.Step` that donates the KV array and the state.
    """
    if stage.mesh.size > 1:
        attention = AttentionByHeads(attention, stage.mesh)
    on_cpu = stage.mesh.devices.flat[0].platform == "cpu"
    row_block = min(_CPU_ROW_BLOCK, bucket.num_rows) if on_cpu else bucket.num_rows
    step = make_step(config, stage.part, bucket, attention, row_block=row_block, return_logits=return_logits)

    def whole(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=stage.whole)

    rows = whole((bucket.num_tokens, config.d_model), jnp.dtype(config.dtype))
    x_td = None if stage.part.has_embed else rows
    buffer = whole((Layout(bucket).size,), jnp.int32)
    arrays = jax.tree.map(_abstract, (held.params, held.cache, held.state))
    shardings = stage.by_heads, stage.whole, stage.whole
    return jax.jit(step, donate_argnums=(1, 2), out_shardings=shardings).lower(*arrays, x_td, buffer)


def _compile_write_lists(state: RowState) -> Any:
    row = jax.ShapeDtypeStruct((), jnp.int32)
    lists = (state.bias_ids_nk, state.bias_nk, state.banned_ids_nk)
    shapes = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in lists)
    abstract = jax.tree.map(_abstract, state)
    return jax.jit(write_lists, donate_argnums=0).lower(abstract, row, *shapes).compile()


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


def _abstract(x: jax.Array, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding)


def progress_bar(show: bool) -> Progress:
    """Returns a bar on standard error, or one that draws nothing."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not show)
