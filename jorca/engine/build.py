"""Putting an engine together from a config, weights and a tokenizer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jorca.attention import Attention, KVCache, choose_attention, get_attention
from jorca.attention.xla import XlaAttention
from jorca.config import ConfigError, EngineConfig, ModelConfig
from jorca.engine.buckets import BucketLadder
from jorca.engine.deterministic import prove_bits, smallest_bucket
from jorca.engine.engine import Engine
from jorca.engine.executor import LocalExecutor
from jorca.engine.output import OutputStage
from jorca.engine.packing import Packer
from jorca.engine.programs import compile_programs, use_compilation_cache
from jorca.engine.sizing import resolve_limits
from jorca.engine.text import Tokenizer
from jorca.model.adjust import RowState
from jorca.model.params import param_table
from jorca.scheduler import Scheduler, make_policy

_logger = logging.getLogger(__name__)


def build_engine(
    model: ModelConfig,
    params: Mapping[str, jax.Array],
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    *,
    show_progress: bool = False,
) -> Engine:
    """Sizes and allocates the KV array, compiles every bucket, and returns an engine that is ready.

    Args:
      model: The model's config.
      params: Its weights by name, as `param_table(model)` says.
      tokenizer: None if there is none.
      config: The engine's options.
      show_progress: Whether compiling draws a progress bar.

    Raises:
      ConfigError: Weights or sizes do not fit.
    """
    _check_params(model, params)
    if config.compilation_cache_dir is not None:
        use_compilation_cache(config.compilation_cache_dir)
    limits = resolve_limits(model, config, _free_bytes(jax.devices()[0]))
    floor = smallest_bucket(model, config.buckets) if config.deterministic else None
    ladder = BucketLadder(limits, config.buckets, floor=floor)
    cache = KVCache.allocate(
        num_layers=model.num_layers,
        num_pages=limits.num_pages,
        num_heads=model.num_heads,
        page_size=limits.page_size,
        head_dim=model.head_dim,
        dtype=jnp.dtype(model.dtype),
    )
    state = RowState.allocate(limits.max_running, model.max_positions)
    programs = compile_programs(
        model,
        ladder,
        _attention(config),
        params,
        cache,
        state,
        # The same programs whether or not anybody reads the logits: the probe does.
        return_logits=config.return_logits or config.deterministic,
        show_progress=show_progress,
    )
    executor = LocalExecutor(params, cache, state, programs, return_logits=config.return_logits)
    if config.deterministic:
        prove_bits(executor, ladder, model, show_progress=show_progress)
        executor.reset()
    return Engine(
        model=model,
        scheduler=Scheduler(limits, make_policy(config.scheduler.policy, **config.scheduler.policy_options)),
        packer=Packer(ladder, limits.num_pages),
        executor=executor,
        output_stage=OutputStage(tokenizer),
        max_failures=config.max_failures,
    )


def _attention(config: EngineConfig) -> Attention:
    """Returns the implementation. In a deterministic engine all rows take one walk in blocks of one size."""
    name, reason = choose_attention(config.attention, jax.devices()[0])
    _logger.info("attention is %s: %s", name, reason)
    attention = get_attention(name)
    if config.deterministic and isinstance(attention, XlaAttention):
        return dataclasses.replace(attention, query_block=16, one_walk=True)
    return attention


def _check_params(model: ModelConfig, params: Mapping[str, jax.Array]) -> None:
    """Raises ConfigError that lists every weight that is missing, unknown or of a wrong shape or dtype."""
    table = param_table(model)
    wrong = [f"missing {name}" for name in table if name not in params]
    wrong += [f"unknown {name}" for name in params if name not in table]
    for name, info in table.items():
        if name in params and (params[name].shape, params[name].dtype) != (info.shape, model.dtype):
            got = f"{params[name].dtype}{list(params[name].shape)}"
            wrong.append(f"{name} must be {model.dtype}{list(info.shape)}, got {got}")
    if wrong:
        raise ConfigError("params do not fit the model: " + "; ".join(wrong))


def _free_bytes(device: Any) -> int | None:
    """Returns what the device's memory has left, or None where the backend does not say (CPU)."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
