"""Times a layer of attention on a GPU; prints a JSON line per shape and implementation.

On a machine without a GPU it compiles the kernels instead (extra `aot`), and prints the table of registers
and shared memory that docs/kernels.md has.

    python benchmarks/attention.py --repeats 5
"""

from __future__ import annotations

import argparse
import json

import jax

from jorca.attention import get_attention
from jorca.bench.attention import measure_attention
from jorca.planning.resources import default_forms, format_table, measure_kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--implementations", nargs="+", default=["mosaic", "triton", "xla"])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if jax.default_backend() == "gpu":
        implementations = {name: get_attention(name) for name in options.implementations}
        for line in measure_attention(implementations, options.repeats):
            print(json.dumps(line), flush=True)
        return
    for attention, gpu in (("triton", "a100-40gb"), ("mosaic", "h200"), ("triton", "h200")):
        if attention in options.implementations:
            forms = default_forms(attention, gpu)
            print(format_table(forms, measure_kernels(forms)), flush=True)


if __name__ == "__main__":
    main()
