"""jorca: GPT models served iteration by iteration, after Orca (OSDI 2022), in JAX.

The public names below are loaded when they are first used; importing the package loads no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jorca.checkpoint import (
        Checkpoint,
        CheckpointError,
        convert_checkpoint,
        load_checkpoint,
        load_config,
        load_params,
        save_checkpoint,
    )
    from jorca.config import (
        BucketConfig,
        CacheConfig,
        ConfigError,
        EngineConfig,
        MeshConfig,
        ModelConfig,
        SchedulerConfig,
    )
    from jorca.engine.llm import LLM
    from jorca.model.init import init_params
    from jorca.model.presets import PRESETS, preset
    from jorca.output import RequestMetrics, RequestOutput
    from jorca.request import (
        FinishReason,
        JorcaError,
        Request,
        RequestRejected,
        SamplingParams,
        TokenLogprobs,
    )

__version__ = "0.1.0"

_HOMES = {
    "jorca.checkpoint": (
        "Checkpoint",
        "CheckpointError",
        "convert_checkpoint",
        "load_checkpoint",
        "load_config",
        "load_params",
        "save_checkpoint",
    ),
    "jorca.config": (
        "BucketConfig",
        "CacheConfig",
        "ConfigError",
        "EngineConfig",
        "MeshConfig",
        "ModelConfig",
        "SchedulerConfig",
    ),
    "jorca.engine.llm": ("LLM",),
    "jorca.model.init": ("init_params",),
    "jorca.model.presets": ("PRESETS", "preset"),
    "jorca.output": ("RequestMetrics", "RequestOutput"),
    "jorca.request": (
        "FinishReason",
        "JorcaError",
        "Request",
        "RequestRejected",
        "SamplingParams",
        "TokenLogprobs",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "PRESETS",
    "BucketConfig",
    "CacheConfig",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "EngineConfig",
    "FinishReason",
    "JorcaError",
    "MeshConfig",
    "ModelConfig",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "RequestRejected",
    "SamplingParams",
    "SchedulerConfig",
    "TokenLogprobs",
    "convert_checkpoint",
    "init_params",
    "load_checkpoint",
    "load_config",
    "load_params",
    "preset",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jorca' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
