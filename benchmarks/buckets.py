"""How far the logits of one position lie apart in buckets of different sizes; prints JSON lines.

Each engine pads its batches to at least `bucket` rows. It gets every request alone, all of them together,
and all of them with their prompts in pieces; for the same tokens, logits are compared with those of the
engine that pads nothing and runs one request at a time. Differences are relative to the largest logit of
the row. In the line that ends a model, `worst` is the largest difference between any two of the runs, and
`parted` counts the requests whose tokens went apart.

    python benchmarks/buckets.py --model shakespeare --dtype float32
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import click
import jax
import numpy as np

import jorca
from jorca import LLM, ModelConfig, RequestOutput, SamplingParams
from jorca.checkpoint.store import load_config, load_params

CHECKPOINTS: Final = Path(__file__).parents[1] / "checkpoints"
BUCKETS: Final = (1, 2, 8, 64, 128, 512)
DTYPES: Final = ("float32", "bfloat16", "float16")
PROMPTS: Final = (1, 16, 65, 130, 200)
"""Lengths that fill blocks of rows and of positions, and lengths that do not; all of them fit 512 rows."""
MARGIN: Final = 4
"""The bound is the worst difference times this, rounded up to a power of two."""

Weights = dict[str, jax.Array]
Model = tuple[ModelConfig, Callable[[ModelConfig], Weights]]


def stored(name: str) -> Model:
    """A checkpoint of this repository."""
    return load_config(CHECKPOINTS / name), lambda config: load_params(CHECKPOINTS / name, config)


def fresh(name: str, num_layers: int, factor: int = 1) -> Model:
    """Random weights of a preset's width; a factor makes scores as far apart as training does."""
    config = jorca.preset(name)
    config = ModelConfig(
        num_layers=num_layers,
        num_heads=config.num_heads,
        d_model=config.d_model,
        vocab_size=8192,  # fewer than GPT-2's, to save time: the largest of them hardly tells
        max_positions=config.max_positions,
    )

    def draw(config: ModelConfig) -> Weights:
        params = jorca.init_params(config)
        return {n: p if "norm" in n else p * p.dtype.type(factor) for n, p in params.items()}

    return config, draw


MODELS: Final[dict[str, Callable[[], Model]]] = {
    "adder": lambda: stored("adder"),
    "shakespeare": lambda: stored("shakespeare"),
    "gpt2, 2 layers": lambda: fresh("gpt2", 2),
    "gpt2, 2 layers, weights x 4": lambda: fresh("gpt2", 2, 4),
    "gpt2, 12 layers, weights x 4": lambda: fresh("gpt2", 12, 4),
    "gpt2-xl, 2 layers": lambda: fresh("gpt2-xl", 2),
}


def runs(
    config: ModelConfig, params: Weights, prompts: Sequence[tuple[int, ...]], greedy: SamplingParams
) -> Iterator[tuple[int, str, list[RequestOutput]]]:
    """Yields (bucket, how requests are given, their outputs), beginning with the fewest rows."""
    # Prompts whose log-probabilities are asked for are fed in pieces of at most `max_batch_size` tokens, so
    # these run in the smallest bucket; whole prompts that are longer run in 512 rows.
    pieces = dataclasses.replace(greedy, prompt_logprobs=0)
    pages = -(-config.max_positions // 64)
    for bucket in BUCKETS:
        llm = LLM.from_params(
            config,
            params,
            min_bucket=bucket,
            bucket_ratio=512.0,
            max_batch_size=min(bucket, 64),
            max_batch_tokens=512,
            num_pages=len(prompts) * pages,
            return_logits=True,
        )
        yield bucket, "alone", [llm.generate([prompt], greedy)[0] for prompt in prompts]
        yield bucket, "together", llm.generate(prompts, greedy)
        yield bucket, "in pieces", llm.generate(prompts, pieces)


def rows_in_common(one: RequestOutput, other: RequestOutput) -> int:
    """Returns how many rows of logits have the same tokens before them."""
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
    return next((i + 1 for i, (mine, its) in pairs if mine != its), len(one.token_ids))


def measure(name: str, dtype: str, tokens: int) -> Iterator[dict[str, object]]:
    """Yields what is printed of one model in one dtype."""
    config, weights = MODELS[name]()
    config = dataclasses.replace(config, dtype=dtype)
    tokens = min(tokens, config.max_positions // 2)
    rng = np.random.default_rng(0)
    lengths = [n for n in PROMPTS if n + tokens <= config.max_positions + 1] or [1]
    prompts = [tuple(rng.integers(config.vocab_size, size=n).tolist()) for n in lengths]
    facts: dict[str, object] = {"model": name, "dtype": dtype}
    base: list[RequestOutput] = []
    lowest: list[np.ndarray] = []
    highest: list[np.ndarray] = []
    parted = 0
    greedy = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    worst: dict[int, dict[str, float]] = {}
    for bucket, how, outputs in runs(config, weights(config), prompts, greedy):
        if not base:
            base = outputs
            lowest, highest = ([output.logits.copy() for output in outputs] for _ in range(2))
        difference = 0.0
        for right, got, low, high in zip(base, outputs, lowest, highest, strict=True):
            rows = rows_in_common(right, got)
            parted += right.token_ids != got.token_ids
            np.minimum(low[:rows], got.logits[:rows], out=low[:rows])
            np.maximum(high[:rows], got.logits[:rows], out=high[:rows])
            difference = max(difference, relative(got.logits[:rows] - right.logits[:rows], right.logits))
        worst.setdefault(bucket, {})[how] = float(f"{difference:.2e}")
    for bucket, by_how in worst.items():
        yield facts | {"bucket": bucket} | by_how
    largest = max(relative(h - low, o.logits) for o, low, h in zip(base, lowest, highest, strict=True))
    rows = sum(len(o.token_ids) for o in base)
    yield facts | {"rows": rows, "worst": float(f"{largest:.2e}"), "parted": parted}


def relative(difference: np.ndarray, logits: np.ndarray) -> float:
    """Returns the largest difference, relative to the largest logit of its row."""
    return float((np.abs(difference).max(-1) / np.abs(logits[: len(difference)]).max(-1)).max())


@click.command()
@click.option("--model", "models", type=click.Choice(list(MODELS)), multiple=True, default=list(MODELS))
@click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, default=DTYPES)
@click.option("--tokens", default=8, show_default=True, help="Tokens that each request generates.")
def main(models: tuple[str, ...], dtypes: tuple[str, ...], tokens: int) -> None:
    """Prints a line per model, dtype and bucket, one per model and dtype, and one per dtype."""
    for dtype in dtypes:
        worst = 0.0
        for name in models:
            line: dict[str, object] = {}
            for line in measure(name, dtype, tokens):
                print(json.dumps(line), flush=True)
            worst = max(worst, float(str(line["worst"])))
        bound = 2.0 ** math.ceil(math.log2(MARGIN * worst)) if worst else 0.0
        print(json.dumps({"dtype": dtype, "worst": worst, "bound": bound}), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
