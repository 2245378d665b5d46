"""Model shapes by name: GPT-2's four sizes, a GPT-3 size, and the four of the Orca paper."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from jorca.config import ConfigError, ModelConfig


def _gpt2(num_layers: int, num_heads: int, d_model: int) -> ModelConfig:
    return ModelConfig(
        num_layers=num_layers,
        num_heads=num_heads,
        d_model=d_model,
        vocab_size=50257,
        max_positions=1024,
        eos_token_id=50256,
    )


def _gpt3(num_layers: int, num_heads: int, d_model: int) -> ModelConfig:
    """fp16 and sequences of up to 2,048, as in the paper's Table 1; the vocabulary is GPT-2's."""
    return ModelConfig(
        num_layers=num_layers,
        num_heads=num_heads,
        d_model=d_model,
        vocab_size=50257,
        max_positions=2048,
        eos_token_id=50256,
        dtype="float16",
    )


PRESETS: Final = MappingProxyType(
    {
        "gpt2": _gpt2(12, 12, 768),
        "gpt2-medium": _gpt2(24, 16, 1024),
        "gpt2-large": _gpt2(36, 20, 1280),
        "gpt2-xl": _gpt2(48, 25, 1600),
        "gpt3-1.3b": _gpt3(24, 16, 2048),
        "orca-13b": _gpt3(40, 40, 5120),
        "orca-101b": _gpt3(80, 80, 10240),
        "orca-175b": _gpt3(96, 96, 12288),
        "orca-341b": _gpt3(120, 120, 15360),
    }
)
"""Configs by name. The paper's models have heads of width 128."""


def preset(name: str) -> ModelConfig:
    """Returns the preset of that name; raises ConfigError, listing the names, if there is none."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}") from None
