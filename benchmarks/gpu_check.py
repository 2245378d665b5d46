"""Checks and times the attention kernels on the GPU of this machine, in minutes; one table comes last.

Every form of every kernel that is for this GPU runs beside the reference: head widths, page sizes, dtypes,
whole and split, and forms that no test can run without a GPU. Then come the times of benchmarks/attention.py.

    python benchmarks/gpu_check.py            # exit status 1 if a form is wrong
    python benchmarks/gpu_check.py --quick    # right or wrong, no times
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jorca.attention import BOUNDS, Attention, check_attention, choose_attention, get_attention
from jorca.attention.tiles import DTYPES, HEAD_DIMS, PAGE_SIZES
from jorca.bench.attention import measure_attention
from jorca.config import ConfigError


def forms(device: Any) -> dict[str, Attention]:
    """Returns the forms of all kernels that run on the device."""
    found: dict[str, Attention] = {}
    for name in ("mosaic", "triton"):
        try:
            choose_attention(name, device)
        except ConfigError:
            continue
        if name == "mosaic":
            from jorca.attention.mosaic import MosaicAttention

            for stages, in_registers in itertools.product((2, 3), (False, True)):
                label = f"mosaic, {stages} stages" + ", weights in registers" * in_registers
                found[label] = MosaicAttention(stages=stages, weights_in_registers=in_registers)
        else:
            from jorca.attention.triton import TritonAttention

            for block_kv, num_warps in itertools.product((32, 64), (4, 8)):
                label = f"triton, blocks of {block_kv}, {num_warps} warps"
                found[label] = TritonAttention(block_kv=block_kv, num_warps=num_warps)
    return found


def largest_error(attention: Attention, dtype: str) -> float:
    """Returns the largest error over all widths and pages; infinite if a form does not compile or run."""
    worst = 0.0
    for head_dim, page_size in itertools.product(HEAD_DIMS, PAGE_SIZES):
        try:
            errors = [e for _, e in check_attention(attention, dtype, head_dim=head_dim, page_size=page_size)]
        except Exception as error:  # one form that fails must not hide the others
            message = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            print(f"H {head_dim}, S {page_size}, {dtype}: {message}", file=sys.stderr)
            errors = [float("inf")]
        worst = max(worst, *errors)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave the times out")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    console, device = Console(), jax.devices()[0]
    tried = forms(device)
    if not tried:
        console.print(f"there is no kernel for {device.device_kind}; jorca doctor says what runs here")
        sys.exit(1)
    table = Table("form", *DTYPES, title=f"Largest error on {device.device_kind}, JAX {jax.__version__}")
    right = []
    for label, attention in tried.items():
        errors = {dtype: largest_error(attention, dtype) for dtype in DTYPES}
        if ok := all(error <= BOUNDS[dtype] for dtype, error in errors.items()):
            right.append(label)
        table.add_row(label, *(f"{error:.1e}" for error in errors.values()), style="green" if ok else "red")
    console.print(table)
    if not options.quick:
        timed = {label: tried[label] for label in right} | {"xla": get_attention("xla")}
        facts, *lines = measure_attention(timed, options.repeats)
        console.print(facts)
        columns = ("shape", "implementation", "us", "floor_us", "of_floor", "kv_gb_per_s", "tflop_per_s")
        columns = (*columns, "error")
        times = Table(*columns, title="Time of one layer")
        for line in lines:
            times.add_row(*(str(line.get(column, "")) for column in columns))
        console.print(times)
    sys.exit(len(right) < len(tried))


if __name__ == "__main__":
    main()
