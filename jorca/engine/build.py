"""Putting an engine together from a config, weights and a tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jorca.attention import (
    Attention,
    abilities_of,
    choose_attention,
    get_attention,
    prove_attention,
)
from jorca.config import ConfigError, EngineConfig, ModelConfig
from jorca.engine.collector import InlineCollector, ThreadCollector
from jorca.engine.deterministic import prove_bits
from jorca.engine.distributed import DistributedExecutor, Master
from jorca.engine.engine import Engine
from jorca.engine.executor import LocalExecutor, StageRunner
from jorca.engine.interfaces import Collector, Executor
from jorca.engine.output import OutputProcessor
from jorca.engine.programs import StageArrays, compile_programs, use_compilation_cache
from jorca.engine.sizing import Sizes, derive_sizes
from jorca.engine.wire import group_facts
from jorca.frontend.text import Tokenizer
from jorca.model.params import mismatches, pad_widths, param_table
from jorca.scheduler import Scheduler, SchedulerLimits, policy_of
from jorca.sharding import Stage, make_stages, pad_vocab
from jorca.sharding.transfer import is_local, place, processes_of

_logger = logging.getLogger(__name__)


Weights = Mapping[str, jax.Array] | Callable[[ModelConfig, Mapping[str, Sharding]], Mapping[str, jax.Array]]
"""A model's weights by name; or what brings those that it is asked for to where they shall lie."""


def build_engine(
    model: ModelConfig,
    weights: Weights,
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    *,
    make_scheduler: Callable[[SchedulerLimits], Scheduler] | None = None,
    make_collector: Callable[[Executor], Collector] | None = None,
    clock: Callable[[], float] = time.monotonic,
    show_progress: bool = False,
) -> Engine:
    """Sizes and allocates the KV array, compiles every bucket, and returns an engine that is ready.

    Args:
      model: The model's config.
      weights: All of its weights, as `param_table(model)` says; or a function that loads them, called
        for each stage with the model (its vocabulary padded, if devices share it) and shardings by name.
      tokenizer: None if there is none.
      config: The engine's options.
      make_scheduler: From the limits, once they are known, to the scheduler; None makes the one that `config`
        asks for.
      make_collector: From the executor to what waits for it; None waits in the caller's thread, or in one of
        its own where processes may be lost meanwhile.
      clock: Seconds, for metrics and the record.
      show_progress: Whether compiling draws a progress bar.

    Raises:
      ConfigError: Weights or sizes do not fit.
    """
    if jax.process_count() == 1:
        built = build_stages(model, weights, config, show_progress=show_progress)
        executor, collector = built.executor, (make_collector or InlineCollector)(built.executor)
    else:
        built, executor = _build_with_workers(model, weights, config, show_progress)
        collector = ThreadCollector(executor) if make_collector is None else make_collector(executor)
        if isinstance(collector, ThreadCollector):
            executor.watch_loss(collector.fail)
    if make_scheduler is None:
        make_scheduler = functools.partial(Scheduler, policy=policy_of(config.scheduler))
    return Engine(
        model=built.model,
        scheduler=make_scheduler(built.sizes.limits),
        packer=built.sizes.packer(),
        executor=executor,
        output_stage=OutputProcessor(tokenizer),
        collector=collector,
        max_failures=config.max_failures,
        clock=clock,
    )


def _build_with_workers(
    model: ModelConfig, weights: Weights, config: EngineConfig, show_progress: bool
) -> tuple[BuiltStages, DistributedExecutor]:
    """Meets the other processes, and builds this one's stages while they build theirs."""
    master = Master(config.hosts, group_facts(model, config))
    try:
        built = build_stages(model, weights, config, agree=master.agree, show_progress=show_progress)
        master.gather("ready")
    except Exception as error:
        master.fail(repr(error))  # or the workers would wait for ever
        raise
    has_outputs = built.sender == jax.process_index()
    executor = DistributedExecutor(
        built.executor, master, has_outputs=has_outputs, timeout_s=config.hosts.iteration_timeout_s
    )
    return built, executor


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltStages:
    """The stages of this process, ready to run.

    Attributes:
      model: The model, with its vocabulary padded for the mesh.
      sizes: What the scheduler may emit, and the buckets.
      executor: Runs the stages.
      sender: The process that has an iteration's outputs, and sends them if it is not the master.
    """

    model: ModelConfig
    sizes: Sizes
    executor: LocalExecutor
    sender: int


def build_stages(
    model: ModelConfig,
    weights: Weights,
    config: EngineConfig,
    *,
    agree: Callable[[int | None], int | None] | None = None,
    show_progress: bool = False,
) -> BuiltStages:
    """Loads, allocates and compiles what this process runs: all stages, or those that have a device of it.

    Args:
      model: As for `build_engine`, like the next two.
      weights: The weights, or what loads them.
      config: The engine's options.
      agree: Turns the bytes that this process's devices have left into those that all processes go by; None
        where there is only this process.
      show_progress: Whether compiling draws a progress bar.

    Raises:
      ConfigError: Weights or sizes do not fit.
    """
    if not callable(weights):
        _check_params(model, weights)
    if config.compilation_cache_dir is not None:
        use_compilation_cache(config.compilation_cache_dir)
    all_stages = make_stages(model, config.mesh)
    _check_processes(all_stages, config)
    stages = [stage for stage in all_stages if is_local(stage)]
    model = pad_vocab(model, config.mesh.tensor)
    load = weights if callable(weights) else functools.partial(_place, weights)
    placed = [load(model, stage.param_shardings(model)) for stage in stages]
    free_bytes = _free_bytes(stages)
    sizes = derive_sizes(model, config, free_bytes if agree is None else agree(free_bytes))
    limits, ladder = sizes.limits, sizes.ladder
    arrays = [
        StageArrays.allocate(
            model,
            stage,
            held,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_running=limits.max_running,
        )
        for stage, held in zip(stages, placed, strict=True)
    ]
    programs = compile_programs(
        model,
        stages,
        arrays,
        ladder,
        _attention(model, config, stages, limits.page_size),
        # The same programs whether or not anybody reads the logits: the probe does.
        return_logits=config.return_logits or config.deterministic,
        show_progress=show_progress,
    )
    executor = LocalExecutor(
        model,
        [StageRunner(*parts) for parts in zip(stages, arrays, programs, strict=True)],
        stages=all_stages,
        return_logits=config.return_logits,
    )
    if config.deterministic:
        prove_bits(executor, ladder, model, show_progress=show_progress)
        executor.reset()
    outputs_in = processes_of(all_stages[-1])
    return BuiltStages(model, sizes, executor, min(outputs_in))


def _check_processes(stages: Sequence[Stage], config: EngineConfig) -> None:
    """Raises ConfigError if the engine cannot run on the processes that there are."""
    if jax.process_count() == 1:
        return
    if config.deterministic:
        raise ConfigError("deterministic must be False with several processes: bits are proven in one alone")
    idle = set(range(jax.process_count())) - {p for stage in stages for p in processes_of(stage)}
    if idle:
        raise ConfigError(
            f"stages * tensor must use a device of each of the {jax.process_count()} processes, but "
            f"{config.mesh.stages} * {config.mesh.tensor} leaves processes {sorted(idle)} without one"
        )


def _place(
    params: Mapping[str, jax.Array], model: ModelConfig, shardings: Mapping[str, Sharding]
) -> dict[str, jax.Array]:
    """Returns weights on the devices where they shall lie; what lies there already is not copied."""
    table = param_table(model)

    def padded(x: jax.Array, rows: int) -> jax.Array:
        return x if x.shape[0] == rows else jnp.pad(x, pad_widths(x.shape, rows))

    return {
        name: place(padded(params[name], table[name].shape[0]), sharding)
        for name, sharding in shardings.items()
    }


def _attention(
    model: ModelConfig, config: EngineConfig, stages: Sequence[Stage], page_size: int
) -> Attention:
    """Returns the implementation; one that must has proven itself on the first device of this process."""
    device, spec = stages[0].mesh.local_devices[0], model.kv_spec
    group_size = model.num_heads // spec.num_kv_heads
    sizes = {"head_dim": spec.head_dim, "page_size": page_size, "group_size": group_size}
    name, reason = choose_attention(config.attention, device, dtype=spec.dtype, **sizes)
    _logger.info("attention is %s: %s", name, reason)
    abilities = abilities_of(name)
    attention = get_attention(name, **(abilities.one_order if config.deterministic else {}))
    if abilities.must_prove:
        with jax.default_device(device):
            prove_attention(attention, spec.dtype, **sizes)
    return attention


def _check_params(model: ModelConfig, params: Mapping[str, jax.Array]) -> None:
    """Raises ConfigError that lists every weight that is missing, unknown or of a wrong shape or dtype."""
    if problems := mismatches(model, params):
        raise ConfigError(f"params do not fit the model ({model.dtype}): " + "; ".join(problems))


def _free_bytes(stages: Sequence[Stage]) -> int | None:
    """Returns what the fullest device has left, or None where the backend does not say (CPU)."""
    left = []
    for device in (device for stage in stages for device in stage.mesh.local_devices):
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return None
        left.append(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return min(left)
