"""Compiles the engine's steps for the paper's models and meshes; prints the table that docs/kernels.md has.

Needs the extra `aot` and no GPU; many minutes on two cores.

    JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python benchmarks/model_steps.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Final

from jorca.config import MeshConfig, ModelConfig
from jorca.engine.buckets import Bucket
from jorca.model.presets import preset
from jorca.planning import CompiledStep, compile_steps, count_launches, read_operations

MESHES: Final = (
    ("gpt3-1.3b", MeshConfig()),
    ("gpt3-1.3b", MeshConfig(tensor=2)),
    ("gpt3-1.3b", MeshConfig(tensor=4)),
    ("gpt3-1.3b", MeshConfig(tensor=8)),
    ("orca-13b", MeshConfig()),
    ("orca-101b", MeshConfig(tensor=8)),
    ("orca-175b", MeshConfig(stages=2, tensor=8)),
)
"""Those of the paper's Table 1, and one model on more of them."""
NUM_TOKENS: Final = (64, 2048)
"""Of a batch of single tokens, and of one with prompts; both have up to 64 requests."""
NUM_PAGES, PAGE_SIZE = 256, 64
HEADER: Final = """\
| model | stages x tensor | stage | GPU | attention | weights, GiB | KV, GiB | scratch, MiB: 64 rows | 2,048 rows | sums | launches |
| --- | --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"""  # noqa: E501


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", nargs="+", default=["a100-40gb", "h200"])
    options = parser.parse_args()
    print(HEADER)
    for name, mesh in MESHES:
        for gpu in options.gpus:
            buckets = [compile_bucket(preset(name), mesh, gpu, num_tokens) for num_tokens in NUM_TOKENS]
            print(*format_rows(name, mesh, gpu, buckets), sep="\n", flush=True)


def compile_bucket(
    model: ModelConfig, mesh: MeshConfig, gpu: str, num_tokens: int, num_pages: int = NUM_PAGES
) -> tuple[CompiledStep, ...]:
    """Compiles the step of every stage for up to 64 requests of full contexts."""
    bucket = Bucket(num_tokens, 64, model.max_positions // PAGE_SIZE, 64 * mesh.stages)
    # Two for one: only the machine code would differ.
    return compile_steps(model, mesh, gpu, bucket, num_pages=num_pages, page_size=PAGE_SIZE, optimize=False)


def format_rows(
    name: str, mesh: MeshConfig, gpu: str, buckets: Sequence[Sequence[CompiledStep]]
) -> Iterable[str]:
    """Yields a line of the table for each stage; `buckets` has its steps for each of `NUM_TOKENS`."""
    for steps in zip(*buckets, strict=True):
        first = steps[0]
        counts = {_count(step) for step in steps}
        assert len(counts) == 1, "buckets differ in nothing but sizes"
        ((sums, launches),) = counts
        cells = (
            name,
            f"{mesh.stages} x {mesh.tensor}",
            first.stage.index,
            gpu,
            first.attention,
            f"{first.weight_bytes / 2**30:.2f}",
            f"{first.kv_bytes / 2**30:.2f}",
            *(f"{step.scratch_bytes / 2**20:.1f}" for step in steps),
            sums,
            launches,
        )
        yield "| " + " | ".join(map(str, cells)) + " |"


def _count(step: CompiledStep) -> tuple[int, int]:
    """Returns how many arrays a greedy step sums over devices, and how often it launches its attention."""
    operations = read_operations(step.program.as_text())
    sums = sum(len(op.shapes) for op in operations if op.kind == "all-reduce" and op.in_entry)
    return sums, count_launches(operations, step.attention)


if __name__ == "__main__":
    main()
