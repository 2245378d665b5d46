"""The engine's own steps for the paper's models and meshes: bytes, copies, exchanges, launches."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from benchmarks.model_steps import (
    MESHES,
    NUM_PAGES,
    NUM_TOKENS,
    PAGE_SIZE,
    compile_bucket,
    format_rows,
)
from jorca.config import MeshConfig
from jorca.engine.buckets import Bucket
from jorca.engine.packing import Layout
from jorca.model.adjust import MAX_BANNED
from jorca.model.presets import preset
from jorca.planning import COLLECTIVES, GPUS, count_launches, read_operations
from jorca.request import MAX_LOGIT_BIAS, MAX_LOGPROBS

pytestmark = pytest.mark.aot

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"
NUM_ROWS = 64
HALF = 2  # bytes of float16


def size(shape):
    """Elements of an HLO shape."""
    return math.prod(int(n) for n in re.findall(r"[\d]+", shape.partition("[")[2]))


def check_bytes(step, model, mesh, num_tokens, num_pages):
    """Holds a device's bytes against closed forms of the model's sizes."""
    part, tensor, d = step.stage.part, mesh.tensor, model.d_model
    vocab = -(-model.vocab_size // tensor) * d  # padded to what the devices share evenly
    # Split: queries, keys and values, output, up, down, and the biases of the first and third.
    layer = (3 * d * d + 3 * d + d * d + 4 * d * d + 4 * d + 4 * d * d) // tensor
    layer += 2 * d + 4 * d  # whole: the biases of output and down, and two norms
    weights = len(part.layers) * layer
    if part.has_embed or part.has_head:  # the head is tied
        weights += vocab
    weights += part.has_embed * model.max_positions * d + part.has_head * 2 * d
    kv_bytes = 2 * len(part.layers) * num_pages * PAGE_SIZE * d // tensor * HALF
    rows = NUM_ROWS * mesh.stages
    state_bytes = part.has_head * 4 * rows * (model.max_positions + 2 * MAX_LOGIT_BIAS + MAX_BANNED)
    assert (step.weight_bytes, step.kv_bytes) == (weights * HALF, kv_bytes)
    assert step.state_bytes == state_bytes

    bucket = Bucket(num_tokens, NUM_ROWS, model.max_positions // PAGE_SIZE, rows)
    inputs = 4 * Layout(bucket).size + (not part.has_embed) * num_tokens * d * HALF
    memory = step.program.memory_analysis()
    assert memory.argument_size_in_bytes == weights * HALF + kv_bytes + state_bytes + inputs
    assert memory.alias_size_in_bytes == kv_bytes + state_bytes  # the step gives back what it was given
    assert step.scratch_bytes < kv_bytes / 2  # there is no room for a copy of the keys or the values


def check_operations(step, model, mesh, num_tokens):
    """Counts what the program copies, exchanges and launches."""
    part, tensor = step.stage.part, mesh.tensor
    operations = read_operations(step.program.as_text())
    large = [x for x in (step.held.cache.keys_lpnsh, *step.held.params.values()) if x.ndim > 1]
    large = {tuple(x.sharding.shard_shape(x.shape)) for x in large} | {x.shape for x in large}
    large = {f"f16[{','.join(map(str, shape))}]" for shape in large}
    copied = {shape for op in operations if op.kind == "copy" for shape in op.shapes}
    assert not copied & large

    assert count_launches(operations, step.attention) == len(part.layers)

    exchanges = [op for op in operations if op.kind in COLLECTIVES]
    if tensor == 1:
        assert not exchanges
        return
    # Whatever is sampled: each layer sums its rows twice, the embedding once more.
    summed = [shape for op in exchanges if op.kind == "all-reduce" and op.in_entry for shape in op.shapes]
    rows = f"f16[{num_tokens},{model.d_model}]"
    assert summed.count(rows) == 2 * len(part.layers) + part.has_embed
    # The head looks for the best logit, its lowest id, and whatever is not finite.
    small = [f"{dtype}[{NUM_ROWS}]" for dtype in ("f32", "pred", "s32")] if part.has_head else []
    assert sorted(shape for shape in summed if shape != rows) == small
    # All else stands in branches for those who sample, or ask for log-probabilities.
    other = [op for op in exchanges if op.kind != "all-reduce" or not op.in_entry]
    assert part.has_head or not other
    assert not any(op.in_entry for op in other)
    candidates = f"[{NUM_ROWS * tensor},{MAX_LOGPROBS}]"  # the best of each device
    for op in other:
        assert op.kind in ("all-reduce", "all-gather")
        for shape in op.shapes:
            assert size(shape) <= 2 * NUM_ROWS if op.kind == "all-reduce" else shape.endswith(candidates)


def check(model, mesh, gpu, num_pages=NUM_PAGES):
    buckets = []
    for num_tokens in NUM_TOKENS:
        steps = compile_bucket(model, mesh, gpu, num_tokens, num_pages)
        assert len(steps) == mesh.stages
        for step in steps:
            check_bytes(step, model, mesh, num_tokens, num_pages)
            check_operations(step, model, mesh, num_tokens)
            memory = step.program.memory_analysis()
            used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
            assert used < GPUS[gpu].memory_bytes
        buckets.append(steps)
    return buckets


USUAL = [(0, "a100-40gb"), (3, "h200")]
ALL = [(i, gpu) for gpu in ("a100-40gb", "h100", "h200") for i in range(len(MESHES))]


@pytest.mark.parametrize(
    ("index", "gpu"),
    [pytest.param(*case, marks=() if case in USUAL else pytest.mark.slow) for case in ALL],
)
def test_layers_launch_once_and_sum_twice_and_nothing_large_is_copied_or_gathered(index, gpu):
    name, mesh = MESHES[index]
    buckets = check(preset(name), mesh, gpu)
    if gpu != "h100":  # there the compiler cuts some products otherwise, which changes nothing but scratch
        for line in format_rows(name, mesh, gpu, buckets):
            assert line in DOCS.read_text(), "benchmarks/model_steps.py prints the table anew"


@pytest.mark.parametrize("gpu", ["a100-40gb", "h200"])
def test_so_do_four_layers_of_175b_on_its_mesh(gpu):
    """Widths, heads, mesh and bytes of the KV array are the real ones; all 96 layers are compiled in the slow
    tests."""
    model = dataclasses.replace(preset("orca-175b"), num_layers=4)
    check(model, MeshConfig(stages=2, tensor=8), gpu, num_pages=NUM_PAGES * 96 // 4)
