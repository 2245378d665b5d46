"""`jorca doctor`: versions, devices, which attention runs and why, and whether it is right."""

from __future__ import annotations

import importlib.metadata
import platform

import jax
from rich.console import Console
from rich.table import Table

from jorca.attention import BOUNDS, check_attention, choose_attention

_PACKAGES = ("jorca", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")


def run_doctor(console: Console) -> bool:
    """Prints versions, devices, the choice of attention and its self-check.

    Returns:
      Whether the self-check passed.
    """
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("python", f"{platform.python_version()} on {platform.machine()}, {platform.system()}")
    for name in _PACKAGES:
        table.add_row(name, _version(name))
    for device in jax.devices():
        table.add_row(f"device {device.id}", _describe(device))
    choice, reason = choose_attention("auto", jax.devices()[0])
    table.add_row("attention", f"{choice}: {reason}")
    passed = True
    for dtype, bound in BOUNDS.items():
        name, _ = choose_attention("auto", jax.devices()[0], dtype=dtype)
        for case, error in check_attention(name, dtype):
            ok = error <= bound
            passed &= ok
            verdict = "[green]ok[/green]" if ok else f"[red]more than {bound:g}[/red]"
            table.add_row(f"self-check {name} {dtype}", f"{case}: off by {error:.1e}, {verdict}")
    console.print(table)
    return passed


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _describe(device: jax.Device) -> str:  # pyright: ignore[reportInvalidTypeForm]
    stats = device.memory_stats() or {}
    memory = f", {stats['bytes_limit'] / 2**30:.1f} GiB" if "bytes_limit" in stats else ""
    capability = getattr(device, "compute_capability", None)
    return f"{device.platform}, {device.device_kind}{f', compute {capability}' if capability else ''}{memory}"
