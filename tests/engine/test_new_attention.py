"""What it takes to add an implementation of attention: a file with its class, and a line in the table."""

import importlib
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from engine.device import greedy, run, tiny_llm
from jorca.attention import AttentionCheckError, abilities_of, get_attention
from jorca.config import ATTENTIONS, ConfigError, EngineConfig, ModelConfig

MODEL = ModelConfig(vocab_size=37, max_positions=16, num_layers=1, num_heads=2, d_model=16)
ENGINE: dict[str, Any] = {"max_batch_size": 2, "max_batch_tokens": 16, "min_bucket": 16, "page_size": 4}

TOY = """
    import dataclasses
    from typing import ClassVar

    from jorca.attention import Abilities, get_attention


    @dataclasses.dataclass(frozen=True)
    class ToyAttention:
        abilities: ClassVar = Abilities(
            platforms=("cpu",),
            made_for=("cpu",),
            note=", and a toy",
            page_sizes=(4, 8),
            one_order={"order": "one"},
            must_prove=True,
        )
        order: str = "any"

        def prepare(self, metadata, *, num_tokens, page_size):
            return get_attention("reference").prepare(metadata, num_tokens=num_tokens, page_size=page_size)

        def __call__(self, q, k, v, cache, layer, prepared, *, scale):
            return get_attention("reference")(q, k, v, cache, layer, prepared, scale=scale * 1)
"""


@pytest.fixture
def add(tmp_path, monkeypatch):
    """Adds an implementation before all others, and takes it out again."""
    monkeypatch.syspath_prepend(tmp_path)
    table = dict(ATTENTIONS)

    def add(name, source):
        (tmp_path / f"{name}_attention.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, f"{name}_attention", raising=False)
        ATTENTIONS.clear()
        ATTENTIONS.update({name: f"{name}_attention:ToyAttention", **table})

    yield add
    ATTENTIONS.clear()
    ATTENTIONS.update(table)


def test_auto_takes_it_where_it_is_made_for_the_device_and_an_engine_runs_it(add, caplog):
    add("toy", TOY)
    caplog.set_level("INFO", "jorca")
    logits = run(tiny_llm(MODEL, **ENGINE), [greedy("a", [1, 2, 3, 4, 5], 6)])["a"]
    assert "attention is toy: made for CPUs, and a toy" in caplog.text
    right = run(tiny_llm(MODEL, attention="reference", **ENGINE), [greedy("a", [1, 2, 3, 4, 5], 6)])["a"]
    np.testing.assert_allclose(logits, right, rtol=1e-5, atol=1e-6)


def test_what_it_does_not_take_is_refused_by_name_and_left_to_xla_by_auto(add, caplog):
    add("toy", TOY)
    options: dict[str, Any] = ENGINE | {"page_size": 16}
    message = "^attention toy takes page_size 4, 8, got 16; use one of these, or attention xla$"
    with pytest.raises(ConfigError, match=message):
        tiny_llm(MODEL, attention="toy", **options)
    caplog.set_level("INFO", "jorca")
    tiny_llm(MODEL, **options)
    assert "attention is xla: attention toy takes page_size 4, 8, got 16" in caplog.text


def test_it_must_prove_itself_before_an_engine_serves(add):
    add("wrong", TOY.replace("scale * 1", "scale * 1.5"))
    with pytest.raises(AttentionCheckError, match="ToyAttention is wrong on cpu: a prompt, a piece"):
        tiny_llm(MODEL, **ENGINE)


def test_one_that_need_not_prove_itself_does_not(add):
    add("trusted", TOY.replace("must_prove=True", "must_prove=False").replace("scale * 1", "scale * 1.5"))
    tiny_llm(MODEL, **ENGINE)


def test_configs_and_messages_know_its_name(add):
    with pytest.raises(ConfigError, match=r"attention must be one of auto, reference, xla, .*, got 'toy'"):
        EngineConfig(attention="toy")
    add("toy", TOY)
    assert EngineConfig(attention="toy").attention == "toy"
    with pytest.raises(ConfigError, match=r"attention must be one of toy, reference, xla, .*, got 'flash'"):
        get_attention("flash")
    assert get_attention("toy", **abilities_of("toy").one_order) == get_attention("toy", order="one")


@pytest.mark.parametrize("name", ["auto", "toy"])
def test_one_that_cannot_be_imported_does_not_stand_in_the_way(add, name, caplog):
    add("toy", "import no_such_backend")
    caplog.set_level("INFO", "jorca")
    if name == "toy":
        with pytest.raises(ConfigError, match=r"attention toy does not work with JAX .*no_such_backend"):
            tiny_llm(MODEL, attention=name, **ENGINE)
        return
    tiny_llm(MODEL, attention=name, **ENGINE)
    assert "attention is xla: attention toy does not work with JAX" in caplog.text
