"""Kernels with a piece of their source replaced."""

import inspect
import sys
import types
from importlib import import_module
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def mutate(kernel: str, old: str, new: str, **options: Any) -> Any:
    """Returns an implementation, interpreted, whose module has `new` in the one place that says `old`."""
    source = inspect.getsource(import_module(f"jorca.attention.{kernel}"))
    assert source.count(old) == 1, f"{old!r} must stand in the {kernel} kernel once"
    module = types.ModuleType("mutant")
    sys.modules["mutant"] = module  # where dataclasses look for the names in annotations
    exec(compile(source.replace(old, new), "mutant", "exec"), module.__dict__)
    if kernel == "triton":
        return module.TritonAttention(interpret=True, **options)
    return module.MosaicAttention(**{"interpret": plgpu.InterpretGPUParams(), **options})
