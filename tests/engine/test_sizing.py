"""What is left for keys and values, and what a step needs besides."""

import re
from pathlib import Path

import pytest

from jorca.config import ConfigError, EngineConfig, ModelConfig
from jorca.engine.sizing import KV_SHARE, SAMPLER_ARRAYS, resolve_limits, sampler_bytes
from jorca.model.presets import preset

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"
MODEL = ModelConfig(
    vocab_size=1000, max_positions=4096, num_layers=6, num_heads=8, d_model=64, dtype="float16"
)
GIB = 2**30


def num_pages(free_bytes, model=MODEL, **options):
    config = EngineConfig.from_options(**{"max_batch_size": 64, "page_size": 64, **options})
    return resolve_limits(model, config, free_bytes).num_pages


@pytest.mark.parametrize("name", ["gpt3-1.3b", "orca-13b"])
def test_the_sampler_takes_what_the_compilers_say_give_or_take_a_tenth(name):
    """Steps of 64 rows on one device need little else; the documentation has their scratch in MiB."""
    model = preset(name)
    rows = re.findall(rf"\| {name} \| 1 x 1 \| 0 \| \S+ \| \S+ \| \S+ \| \S+ \| (\S+) \|", DOCS.read_text())
    assert len(rows) == 2
    for mib in rows:
        assert 0.9 <= float(mib) * 2**20 / sampler_bytes(model, 64, tensor=1) <= 1
    assert sampler_bytes(model, 64, tensor=8) == SAMPLER_ARRAYS * 64 * 4 * 6283  # its share of the vocabulary


@pytest.mark.parametrize(("stages", "tensor"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_pages_fill_the_share_of_what_weights_and_sampler_leave(stages, tensor):
    free = GIB // 16 + sampler_bytes(MODEL, 64, tensor)
    layers, heads = {1: 6, 2: 3, 4: 2}[stages], 8 // tensor  # of the first stage, on one device
    page_bytes = 2 * layers * heads * 8 * 64 * 2
    assert num_pages(free, stages=stages, tensor=tensor) == int(GIB // 16 * KV_SHARE) // page_bytes


def test_every_resident_request_can_hold_a_full_context_where_there_is_room():
    assert num_pages(64 * GIB) == num_pages(None) == 64 * 4096 // 64


def test_no_room_is_an_error_that_says_what_to_do():
    for free in (0, sampler_bytes(MODEL, 64, 1), sampler_bytes(MODEL, 64, 1) + 1000):
        with pytest.raises(
            ConfigError, match="no memory is left for a KV page of 98304 bytes on a device; low"
        ):
            num_pages(free)
    assert num_pages(sampler_bytes(MODEL, 64, 1) + 98304 * 2) == 1
    assert num_pages(0, num_pages=9) == 9  # what is asked for is not second-guessed


def test_memory_that_is_given_is_that_of_all_devices_together():
    assert num_pages(None, kv_memory_bytes=98304 * 5 + 1, stages=2, tensor=2) == 5
