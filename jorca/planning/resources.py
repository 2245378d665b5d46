"""What an attention kernel needs of a GPU, read from the compilers' reports. No GPU is needed.

The reports are switched on by the environment of the compiling process and come out of its standard
streams, so that the work is done by a process of its own: `python -m jorca.planning.resources`, which reads
forms as JSON lines and writes resources as JSON lines.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from jorca.attention.tiles import HEAD_DIMS, PAGE_SIZES

_ENVIRONMENT: Final = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # there is no driver to have a version
    # What XLA's assembler says, for Triton.
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TF_CPP_VMODULE": "subprocess_compilation=3",
    # The same for Mosaic GPU.
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "MOSAIC_GPU_DUMP_RESOURCES": "1",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelForm:
    """One form of a kernel, as the compiler sees it.

    Attributes:
      attention: "triton" or "mosaic".
      gpu: In `jorca.planning.GPUS`.
      dtype: Of queries, keys and values.
      head_dim: Head width, H.
      page_size: Positions in a page, S.
      block_q: Query rows of a tile; always 64 in Mosaic.
      splits: Thread blocks that share the KV length of a tile.
      weights_in_registers: See `MosaicAttention`; False in Triton.
    """

    attention: str
    gpu: str
    dtype: str
    head_dim: int
    page_size: int = 64
    block_q: int = 64
    splits: int = 1
    weights_in_registers: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelResources:
    """What a thread block needs.

    Attributes:
      registers: Of each thread, 255 at most.
      spill_bytes: That each thread stores to memory for want of registers.
      shared_bytes: Shared memory.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int


def default_forms(attention: str, gpu: str, dtype: str = "bfloat16") -> list[KernelForm]:
    """Returns the forms of a kernel that are chosen by default, in one dtype."""
    tiles = (16, 64) if attention == "triton" else (64,)
    return [
        KernelForm(
            attention=attention,
            gpu=gpu,
            dtype=dtype,
            head_dim=head_dim,
            page_size=page_size,
            block_q=block_q,
            splits=splits,
        )
        for head_dim, block_q, page_size, splits in itertools.product(HEAD_DIMS, tiles, PAGE_SIZES, (1, 4))
    ]


def measure_kernels(forms: Sequence[KernelForm]) -> list[KernelResources]:
    """Compiles forms in a process of its own and returns what each needs; some seconds per form.

    Raises:
      RuntimeError: The process failed, for instance because the extra `aot` is not installed; its
        output is in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_gpu_ptx_compiler_extra_flags=-v"
        process = subprocess.run(
            [sys.executable, "-m", "jorca.planning.resources"],
            input="".join(json.dumps(dataclasses.asdict(form)) + "\n" for form in forms),
            env={**os.environ, **_ENVIRONMENT, "XLA_FLAGS": flags},
            capture_output=True,
            text=True,
            check=False,
        )
    if process.returncode:
        raise RuntimeError(f"compiling kernels failed:\n{process.stderr[-4000:]}")
    return [KernelResources(**json.loads(line)) for line in process.stdout.splitlines()]


def format_table(forms: Sequence[KernelForm], resources: Sequence[KernelResources]) -> str:
    """Returns a Markdown table, a line for each kernel, GPU, head width and tile.

    Each of the four cells behind them has the registers of a thread and the shared memory of a block.
    """
    lines = [
        "| attention | GPU | head width | tile rows | S 64 | S 64, split | S 128 | S 128, split |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    rows: dict[tuple[Any, ...], list[str]] = {}
    for form, needed in zip(forms, resources, strict=True):
        cell = f"{needed.registers} / {needed.shared_bytes / 1024:g}"
        if needed.spill_bytes:
            cell += f", {needed.spill_bytes} B spilt"
        rows.setdefault((form.attention, form.gpu, form.head_dim, form.block_q), []).append(cell)
    lines += ["| " + " | ".join(map(str, (*row, *cells))) + " |" for row, cells in rows.items()]
    return "\n".join(lines)


def _serve(lines: Iterable[str]) -> Iterator[str]:
    """Compiles the forms in `lines` and yields what they need. Standard output and error go to a file."""
    with tempfile.TemporaryFile(mode="w+", errors="replace") as log:
        errors = os.dup(2)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            for line in lines:
                log.seek(0)
                log.truncate()
                for dump in _dump_folder().iterdir():
                    dump.unlink()
                _compile(KernelForm(**json.loads(line)))
                log.seek(0)
                yield json.dumps(dataclasses.asdict(_read_reports(log.read())))
        finally:
            os.dup2(errors, 2)


def _compile(form: KernelForm) -> None:
    """Compiles one layer's attention for 544 rows of up to 33 requests."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jorca.attention import AttentionMetadata, KVCache, get_attention, selective_attention
    from jorca.planning.topology import compile_for, make_devices

    mesh = Mesh(np.array(make_devices(form.gpu)), ("tensor",))
    whole = NamedSharding(mesh, PartitionSpec())

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    own = "block_q" if form.attention == "triton" else "weights_in_registers"
    options: dict[str, Any] = {"splits": form.splits, own: getattr(form, own)}
    attention = dataclasses.replace(get_attention(form.attention), **options)  # pyright: ignore
    dtype = jnp.dtype(form.dtype)
    x_tnh = array(dtype, 544, 16, form.head_dim)
    pages = array(dtype, 4, 256, 16, form.page_size, form.head_dim)
    numbers_b = array(jnp.int32, 33)
    metadata = AttentionMetadata(numbers_b, numbers_b, numbers_b, array(jnp.int32, 33, 16))

    def attend(q: Any, k: Any, v: Any, cache: KVCache, layer: Any, metadata: AttentionMetadata) -> Any:
        scale = form.head_dim**-0.5
        return selective_attention(q, k, v, cache, layer, metadata, scale=scale, implementation=attention)

    arguments = x_tnh, x_tnh, x_tnh, KVCache(pages, pages), array(jnp.int32), metadata
    compile_for(mesh, lambda: jax.jit(attend, donate_argnums=3).lower(*arguments))


def _dump_folder() -> Path:
    return Path(os.environ["XLA_FLAGS"].split()[0].partition("=")[2])


def _read_reports(log: str) -> KernelResources:
    """Reads what the assembler said of the kernel, and how much shared memory its launch takes."""
    pattern = r"entry function 'selective_attention.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    report = re.search(pattern, log, re.DOTALL)
    assert report is not None, f"the assembler did not report on the kernel:\n{log}"
    shared = re.search(r"smem_scratch_bytes=(\d+)", log)
    if shared is None:  # Triton's is in XLA's list of launches
        launches = next(_dump_folder().glob("*.thunk_sequence.txt")).read_text()
        shared = re.search(r" selective_attention .* shared_memory: (\d+) bytes", launches)
        assert shared is not None, f"XLA does not list the kernel among its launches:\n{launches}"
    return KernelResources(registers=int(report[2]), spill_bytes=int(report[1]), shared_bytes=int(shared[1]))


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as answers:
        for answer in _serve(sys.stdin):
            print(answer, file=answers, flush=True)
