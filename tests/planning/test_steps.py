"""What is compiled from shapes alone is what an engine runs."""

from typing import Any

import jax
import pytest

from engine.device import executor_of, tiny_llm
from jorca.attention import get_attention
from jorca.config import ConfigError, MeshConfig, ModelConfig
from jorca.engine.buckets import Bucket
from jorca.engine.programs import StageArrays, lower_step
from jorca.planning import compile_steps
from jorca.sharding import pad_vocab

CONFIG = ModelConfig(vocab_size=37, max_positions=24, num_layers=2, num_heads=8, d_model=16, d_ff=24)


def test_shapes_alone_give_the_program_of_the_arrays_that_an_engine_has():
    options: dict[str, Any] = {"min_bucket": 16, "max_batch_tokens": 16, "max_batch_size": 4, "page_size": 4}
    llm = tiny_llm(CONFIG, stages=2, tensor=2, **options)
    model = pad_vocab(CONFIG, 2)
    for runner in executor_of(llm).stages:
        (bucket,) = runner.programs
        real = StageArrays(runner.params, runner.cache, runner.state)
        sizes = {"num_pages": runner.cache.num_pages, "page_size": 4, "max_running": bucket.max_running}
        held = StageArrays.abstract(model, runner.stage, **sizes)
        assert facts(held) == facts(real)
        ours, theirs = (
            lower_step(model, runner.stage, arrays, bucket, get_attention("xla"), return_logits=True)
            for arrays in (held, real)
        )
        assert ours.as_text() == theirs.as_text()


def facts(arrays):
    leaves = jax.tree.leaves_with_path((dict(arrays.params), arrays.cache, arrays.state))
    return [(path, x.shape, x.dtype, x.sharding) for path, x in leaves]


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (MeshConfig(tensor=3), "tensor must divide num_heads and d_ff, got tensor 3"),
        (MeshConfig(stages=3), "stages must be at most the model's 2 layers, got 3"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_as_by_the_engine(mesh, message, monkeypatch):
    monkeypatch.setattr("jorca.planning.steps.make_devices", lambda *_: jax.devices())
    with pytest.raises(ConfigError, match=message):
        compile_steps(CONFIG, mesh, "h100", Bucket(8, 4, 6, 4), num_pages=8, page_size=4)
