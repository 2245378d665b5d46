"""Which attention runs on a device, and why."""

from __future__ import annotations

from typing import Any, Literal


def choose_attention(
    name: Literal["auto", "reference", "xla"], device: Any
) -> tuple[Literal["reference", "xla"], str]:
    """Returns the implementation to use, and the reason in words.

    Args:
      name: What the user asked for; "auto" leaves it to the device.
      device: One of the devices that run the model.
    """
    if name != "auto":
        return name, "asked for by name"
    if device.platform == "cpu":
        return "xla", "made for CPUs"
    return "xla", f"there is no kernel for {device.device_kind} yet, and it runs everywhere"
