"""Reads the logits that Hugging Face transformers computed (see tests/golden/make_hf_golden.py)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from jorca.config import ModelConfig

Array = np.ndarray[Any, Any]

_FILE = Path(__file__).parents[1] / "golden" / "hf_gpt2.npz"


@dataclasses.dataclass(frozen=True, slots=True)
class GoldenCase:
    """One tiny model and what it says.

    Attributes:
      name: What the case is about.
      config: The model.
      params: Its weights, float32, by jorca's names and in its layouts.
      sequences: Pairs of token ids [T] and logits float32 [T, V].
    """

    name: str
    config: ModelConfig
    params: dict[str, Array]
    sequences: tuple[tuple[Array, Array], ...]

    def __str__(self) -> str:
        return self.name


def golden_cases() -> list[GoldenCase]:
    """Returns every case of the file."""
    with np.load(_FILE, allow_pickle=False) as file:
        arrays = dict(file)
    cases = []
    for name, config in json.loads(str(arrays["configs"])).items():
        params = {
            k.removeprefix(f"{name}/params/"): v for k, v in arrays.items() if k.startswith(f"{name}/params/")
        }
        num_sequences = sum(k.startswith(f"{name}/ids/") for k in arrays)
        sequences = tuple(
            (arrays[f"{name}/ids/{i}"], arrays[f"{name}/logits/{i}"]) for i in range(num_sequences)
        )
        cases.append(GoldenCase(name, ModelConfig(**config), params, sequences))
    return cases
