"""What an engine makes of the choice of attention, on GPUs that are stood in for."""

import contextlib
import types
from typing import Any

import pytest

from jorca import ConfigError, EngineConfig, ModelConfig
from jorca.attention import AttentionCheckError
from jorca.engine import build

HALF = ModelConfig(vocab_size=64, max_positions=128, num_layers=1, num_heads=2, d_model=128, dtype="bfloat16")
KERNELS = [("9.0", "MosaicAttention"), ("8.0", "TritonAttention")]


def attention_on(capability: str, page_size: int = 128, **options):
    """Chooses for a stage whose device says that it is a GPU."""
    device = types.SimpleNamespace(platform="gpu", device_kind="a GPU", compute_capability=capability)
    stage = types.SimpleNamespace(mesh=types.SimpleNamespace(local_devices=[device]))
    return build._attention(HALF, EngineConfig.from_options(**options), [stage], page_size)  # pyright: ignore


@pytest.fixture
def proven(monkeypatch):
    """What was asked to prove itself: a CPU cannot run it."""
    asked = []
    monkeypatch.setattr(build, "prove_attention", lambda *facts, **sizes: asked.append((*facts, sizes)))
    monkeypatch.setattr(build.jax, "default_device", contextlib.nullcontext)
    return asked


@pytest.mark.parametrize(("capability", "kernel"), KERNELS)
def test_a_kernel_proves_itself_in_the_sizes_of_the_engine(capability, kernel, proven):
    attention = attention_on(capability)
    assert type(attention).__name__ == kernel
    assert proven == [(attention, "bfloat16", {"head_dim": 64, "page_size": 128, "group_size": 1})]


@pytest.mark.parametrize(("capability", "kernel"), KERNELS)
def test_a_kernel_that_is_wrong_stops_the_engine_before_it_serves(capability, kernel, proven, monkeypatch):
    def refuse(*_, **__):
        raise AttentionCheckError(f"{kernel} is wrong")

    monkeypatch.setattr(build, "prove_attention", refuse)
    with pytest.raises(AttentionCheckError, match=kernel):
        attention_on(capability)


def test_pages_that_no_kernel_takes_go_to_xla_and_are_refused_for_a_kernel_by_name(proven):
    assert type(attention_on("9.0", page_size=16)).__name__ == "XlaAttention"
    with pytest.raises(ConfigError, match="attention mosaic takes page_size 64, 128, got 16"):
        attention_on("9.0", page_size=16, attention="mosaic")
    assert proven == []


@pytest.mark.parametrize(("capability", "kernel"), KERNELS)
def test_a_deterministic_engine_never_splits_a_walk(capability, kernel, proven):
    attention: Any = attention_on(capability, deterministic=True)
    assert attention.splits == 1
    assert kernel == "MosaicAttention" or attention.block_q == 64
