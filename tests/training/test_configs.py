"""Every field of a training run's config: its edges, every kind of wrong value, and the message."""

import dataclasses
import re

import pytest

from jorca.config import ConfigError
from jorca.training import TrainConfig

NAN, INF = float("nan"), float("inf")
COUNTS = ("vocab_size", "layers", "heads", "width", "batch_size", "steps", "warmup_steps", "eval_every")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        *[(name, [0, -1, 1.5, True, "1", None]) for name in (*COUNTS, "checkpoint_every", "data_parallel")],
        ("tensor", [0, 2.0]),
        ("context", [1, 0, 2.5]),
        ("seed", [-1, 2**32, 0.5]),
        ("learning_rate", [0, -1e-3, INF, NAN, "1e-3"]),
        ("clip_norm", [0, -1, INF, NAN]),
        ("weight_decay", [-0.1, INF, NAN, True]),
        ("dropout", [-0.1, 1, NAN]),
        ("validation_share", [0, 1, -0.1, NAN]),
        ("test_share", [-0.1, 1, NAN]),
        ("dtype", ["float16", "f32", None]),
        ("save_dtype", ["float64", 2]),
    ],
)
def test_a_wrong_value_is_refused_by_field_and_value(field, values):
    for value in values:
        with pytest.raises(ConfigError, match=f"^{field} must be .*{re.escape(str(value))}"):
            TrainConfig(**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 3, "width": 64}, "heads must divide width, got heads 3 and width 64"),
        ({"data_parallel": 3, "batch_size": 16}, "data_parallel must divide batch_size, got data_parallel 3"),
        ({"steps": 5, "warmup_steps": 5}, "warmup_steps must be below steps, got warmup_steps 5 and steps 5"),
        ({"validation_share": 0.5, "test_share": 0.5}, "together must be below 1, got 0.5 and 0.5"),
    ],
)
def test_values_that_do_not_go_together_are_refused_with_both(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        TrainConfig(**fields)


def test_the_edges_are_allowed():
    TrainConfig(weight_decay=0, dropout=0, test_share=0, seed=2**32 - 1, context=2, warmup_steps=1, steps=2)


def test_the_model_has_the_sizes_of_the_run():
    config = TrainConfig(vocab_size=300, layers=3, heads=5, width=20, context=7, dtype="bfloat16")
    model = dataclasses.asdict(config.model_config())
    expected = {"vocab_size": 300, "num_layers": 3, "num_heads": 5, "d_model": 20, "d_ff": 80}
    assert model.items() >= (expected | {"max_positions": 7, "dtype": "bfloat16"}).items()
