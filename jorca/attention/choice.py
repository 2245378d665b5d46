"""Which attention runs on a device, and why."""

from __future__ import annotations

from typing import Any, Final

from jorca.attention.api import Implementation
from jorca.attention.tiles import why_not
from jorca.config import AttentionImplementation, ConfigError

_KERNELS: Final[dict[int, Implementation]] = {8: "triton", 9: "mosaic"}
"""By the major number of the compute capability."""


def choose_attention(
    name: AttentionImplementation,
    device: Any,
    *,
    page_size: int | None = None,
    head_dim: int | None = None,
    dtype: Any = None,
) -> tuple[Implementation, str]:
    """Returns the implementation to use, and the reason in words.

    Args:
      name: What the user asked for; "auto" leaves it to the device and to the sizes that follow.
      device: One of the devices that run the model.
      page_size: Positions in a page, S; None if it does not matter yet, likewise below.
      head_dim: Head width, H.
      dtype: Of queries, keys and values.

    Raises:
      ConfigError: What was asked for by name does not run on the device, or does not take the sizes.
    """
    sizes = {"page_size": page_size, "head_dim": head_dim, "dtype": dtype}
    major = _major(device)
    if name == "auto":
        if device.platform == "cpu":
            return "xla", "made for CPUs"
        kernel = _KERNELS.get(major)
        if kernel is None:
            return "xla", f"there is no kernel for {device.device_kind} yet, and it runs everywhere"
        if reason := why_not(kernel, **sizes):
            return "xla", reason
        reason = f"made for compute capability {major}.x, which {device.device_kind} has"
        return kernel, reason + "; JAX will remove its Triton backend" * (kernel == "triton")
    if name in _KERNELS.values():
        fits = major == 9 if name == "mosaic" else major >= 8
        if not fits:
            needs = "9.x" if name == "mosaic" else "8.0 or newer"
            raise ConfigError(
                f"attention {name} needs a GPU of compute capability {needs}, got {device.device_kind}; "
                "use auto or xla"
            )
        if reason := why_not(name, **sizes):
            raise ConfigError(reason)
    return name, "asked for by name"


def _major(device: Any) -> int:
    """Returns the major number of an NVIDIA GPU's compute capability, 0 for all other devices."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return int(major) if major.isdecimal() and minor else 0
