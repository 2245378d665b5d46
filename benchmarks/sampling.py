"""What sampling costs: greedy rows, one row with a nucleus among greedy ones, and all rows sampled.

Prints JSON lines, with a full sort of the same logits beside them.

    python benchmarks/sampling.py
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np

from jorca.model.sampling import RowSampling, sample


def median_ms(function: Callable[..., Any], *args: Any, repeats: int) -> float:
    """Returns the median time of a call in milliseconds, compiling excluded."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - started)
    return float(np.median(times)) * 1e3


def rows(num_rows: int, num_sampled: int, top_k: int, top_p: float) -> RowSampling:
    """The first `num_sampled` rows are sampled, the others are greedy."""
    temperature = np.zeros(num_rows, np.float32)
    temperature[:num_sampled] = 1
    return RowSampling(
        temperature_r=jnp.asarray(temperature),
        top_k_r=jnp.full(num_rows, top_k, jnp.int32),
        top_p_r=jnp.full(num_rows, top_p, jnp.float32),
        min_p_r=jnp.zeros(num_rows, jnp.float32),
        seed_r2=jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (num_rows, 2)), jnp.uint32),
        position_r=jnp.arange(num_rows, dtype=jnp.int32),
    )


@click.command()
@click.option("--num-rows", default=32, show_default=True)
@click.option("--vocab", default=50257, show_default=True)
@click.option("--row-block", "row_blocks", type=int, multiple=True, default=[1, 4, 32], show_default=True)
@click.option("--repeats", default=9, show_default=True)
def main(num_rows: int, vocab: int, row_blocks: tuple[int, ...], repeats: int) -> None:
    """Times the sampler on random logits."""
    normal = np.random.default_rng(0).normal(0, 3, (num_rows, vocab))
    logits_rv = jnp.asarray(normal.astype(np.float32))
    for row_block in row_blocks:
        run = jax.jit(functools.partial(sample, row_block=row_block))
        for name, num_sampled, top_k, top_p in (
            ("all greedy", 0, 0, 1.0),
            ("one row, temperature", 1, 0, 1.0),
            ("one row, top_p", 1, 0, 0.9),
            ("all rows, temperature", num_rows, 0, 1.0),
            ("all rows, top_p", num_rows, 0, 0.9),
            ("all rows, top_k and top_p", num_rows, 50, 0.9),
        ):
            settings = rows(num_rows, num_sampled, top_k, top_p)
            ms = median_ms(run, logits_rv, settings, repeats=repeats)
            print(json.dumps({"case": name, "row_block": row_block, "ms": round(ms, 2)}), flush=True)
    for name, function in (("full sort", jnp.sort), ("argmax", jnp.argmax)):
        ms = median_ms(jax.jit(functools.partial(function, axis=-1)), logits_rv, repeats=3)
        print(json.dumps({"case": name, "ms": round(ms, 2)}), flush=True)


if __name__ == "__main__":
    main()
