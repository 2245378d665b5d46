"""Memory that converting takes: GPT-2 124M's shape, 500 MB of random weights as Hugging Face stores them.

    python benchmarks/convert_memory.py

Prints JSON lines. Each thing is measured in a process of its own, which samples its anonymous memory
(RssAnon of /proc/self/status, hence Linux) every 2 ms:

    import      importing jorca.checkpoint, JAX and Orbax: what is there before anything is converted
    orbax       what Orbax takes by default to save such a tree of arrays, above the arrays themselves
    save        the same as jorca sets Orbax up, which neither copies nor compresses
    convert     what jorca takes above `import` to convert the file: whole, in ten shards, and to bfloat16
    load        what loading the file without converting it first takes, the model included

`of_model` is the peak as a share of the weights' bytes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NUM_SHARDS = 10
CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


def main() -> None:
    """Measures everything and prints a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where files go; default: a temporary one")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory(dir=folder) as name:
        scratch = Path(name)
        run(write_sources, scratch)
        model_bytes = (scratch / "whole/model.safetensors").stat().st_size
        for what, function, args in (
            ("import", measure_import, ()),
            ("orbax", measure_orbax, (scratch,)),
            ("save", measure_save, (scratch,)),
            ("convert one file", measure_convert, (scratch, "whole", None)),
            ("convert ten shards", measure_convert, (scratch, "shards", None)),
            ("convert one file to bfloat16", measure_convert, (scratch, "whole", "bfloat16")),
            ("load one file", measure_load, (scratch, "whole")),
        ):
            figures = run(function, *args)
            peak = figures["peak_anonymous_bytes"]
            print(json.dumps({"what": what, **figures, "of_model": round(peak / model_bytes, 3)}), flush=True)


def run(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in a new process and returns what it returns."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


class Peak:
    """The most anonymous memory inside a `with` block, above what there was before it."""

    def __enter__(self) -> Peak:
        self._start = time.perf_counter()
        self._base = self._most = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self.figures = {
            "before_bytes": self._base,
            "peak_anonymous_bytes": self._most - self._base,
            "seconds": round(time.perf_counter() - self._start, 2),
        }

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self._most = max(self._most, anonymous_bytes())


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    status = Path("/proc/self/status").read_text()
    (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(kib)


def make_params() -> dict[str, np.ndarray]:
    """GPT-2's weights by jorca's names, random."""
    from jorca.model.params import param_table
    from jorca.model.presets import preset

    rng = np.random.default_rng(0)
    table = param_table(preset("gpt2"))
    return {name: rng.standard_normal(info.shape, np.float32) for name, info in table.items()}


def write_sources(scratch: Path) -> None:
    """Writes the same model as one file and in shards."""
    from safetensors.numpy import save_file

    from jorca.checkpoint.gpt2 import gpt2_table
    from jorca.model.presets import preset

    params = make_params()
    table = gpt2_table(preset("gpt2"), out_in=False)
    tensors = {source.key: params[name].reshape(source.shape) for name, source in table.items()}
    for name in ("whole", "shards"):
        (scratch / name).mkdir()
        (scratch / name / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, scratch / "whole/model.safetensors")
    weight_map: dict[str, str] = {}
    for i in range(NUM_SHARDS):
        keys = list(tensors)[i::NUM_SHARDS]
        file = f"model-{i + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        save_file({key: tensors[key] for key in keys}, scratch / "shards" / file)
        weight_map |= dict.fromkeys(keys, file)
    (scratch / "shards/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def import_all() -> None:
    """Imports what jorca.checkpoint itself imports only where weights are read or written."""
    import jax  # noqa: F401
    import orbax.checkpoint  # noqa: F401

    import jorca.checkpoint  # noqa: F401


def measure_import() -> dict[str, Any]:
    """Returns what importing takes."""
    with Peak() as peak:
        import_all()
    return peak.figures


def measure_orbax(scratch: Path) -> dict[str, Any]:
    """Returns what Orbax takes to save arrays that are in memory."""
    import orbax.checkpoint as ocp

    params = make_params()
    with Peak() as peak, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(scratch / "orbax", params)
        checkpointer.wait_until_finished()
    return peak.figures


def measure_save(scratch: Path) -> dict[str, Any]:
    """Returns what `save_checkpoint` takes for the same arrays."""
    import jorca.checkpoint
    from jorca.model.presets import preset

    import_all()
    params = make_params()
    with Peak() as peak:
        jorca.checkpoint.save_checkpoint(scratch / "save", preset("gpt2"), params)
    return peak.figures


def measure_convert(scratch: Path, source: str, dtype: Any) -> dict[str, Any]:
    """Returns what converting takes."""
    import jorca.checkpoint

    import_all()
    with Peak() as peak:
        jorca.checkpoint.convert_checkpoint(scratch / source, scratch / f"{source}-{dtype}", dtype=dtype)
    return peak.figures


def measure_load(scratch: Path, source: str) -> dict[str, Any]:
    """Returns what loading takes, which is the model and what it needs on the way."""
    import jax

    import jorca.checkpoint

    import_all()
    jax.local_devices()
    with Peak() as peak:
        jorca.checkpoint.load_checkpoint(scratch / source)
    return peak.figures


if __name__ == "__main__":
    main()
