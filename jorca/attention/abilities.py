"""What an implementation of attention can do: its class states it, whoever chooses or runs one reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """Where an implementation runs, what it takes, and what an engine must do about it.

    A class has its own as the attribute `abilities`. Of devices and sizes None means all.

    Attributes:
      platforms: JAX's names of the platforms that it runs on, such as "cpu".
      compute_capability: First and last major number of the NVIDIA GPUs that it runs on; a last one of None
        stands for all newer ones.
      made_for: Where "auto" takes it: platforms, and major numbers of compute capabilities.
      note: What the reason for that choice ends with.
      page_sizes: Positions in a page, S.
      head_dims: Head widths, H.
      dtypes: Of queries, keys and values.
      group_sizes: How many query heads share one key/value head, N / N_kv.
      one_order: Options with which a row's sums run in one order, whatever the bucket, for engines that are
        deterministic.
      must_prove: Whether it runs beside the reference, in the engine's sizes, before an engine serves.
    """

    platforms: tuple[str, ...] | None = None
    compute_capability: tuple[int, int | None] | None = None
    made_for: tuple[str | int, ...] = ()
    note: str = ""
    page_sizes: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    group_sizes: tuple[int, ...] | None = None
    one_order: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    must_prove: bool = False

    def why_not(
        self,
        who: str,
        *,
        page_size: int | None = None,
        head_dim: int | None = None,
        dtype: Any = None,
        group_size: int | None = None,
    ) -> str | None:
        """Returns what is not taken, with what is and a remedy; None if all is taken.

        Args:
          who: The implementation, for the message.
          page_size: Positions in a page, S; None if it does not matter yet, likewise below.
          head_dim: Head width, H.
          dtype: Of queries, keys and values.
          group_size: Query heads that share one key/value head.
        """
        dtype = None if dtype is None else jnp.dtype(dtype).name
        facts = (
            ("page_size", page_size, self.page_sizes),
            ("head width", head_dim, self.head_dims),
            ("dtype", dtype, self.dtypes),
            ("query heads per key/value head", group_size, self.group_sizes),
        )
        for what, value, taken in facts:
            if value is not None and taken is not None and value not in taken:
                takes = ", ".join(map(str, taken))
                return f"{who} takes {what} {takes}, got {value}; use one of these, or attention xla"
        return None

    def why_not_on(self, who: str, device: Any) -> str | None:
        """Returns what a device lacks, with a remedy; None if the implementation runs there."""
        needs = None
        if self.platforms is not None and device.platform not in self.platforms:
            needs = f"one of the platforms {', '.join(self.platforms)}"
        if self.compute_capability is not None:
            (first, last), major = self.compute_capability, _major(device)
            if not first <= major <= (last or major):
                upward = "or newer" if last is None else f"to {last}.x"
                numbers = f"{first}.x" if first == last else f"{first}.0 {upward}"
                needs = f"a GPU of compute capability {numbers}"
        return needs and f"{who} needs {needs}, got {device.device_kind}; use auto or xla"

    def why_on(self, device: Any) -> str | None:
        """Returns why "auto" takes the implementation on a device; None where it does not."""
        if device.platform in self.made_for:
            return f"made for {device.platform.upper()}s{self.note}"
        major = _major(device)
        if major in self.made_for:
            return f"made for compute capability {major}.x, which {device.device_kind} has{self.note}"
        return None


def refuse(attention: Any, **sizes: Any) -> None:
    """Raises NotImplementedError with what an implementation says that it does not take of the sizes."""
    if reason := attention.abilities.why_not(type(attention).__name__, **sizes):
        raise NotImplementedError(reason)


def _major(device: Any) -> int:
    """Returns the major number of an NVIDIA GPU's compute capability, 0 for all other devices."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return int(major) if major.isdecimal() and minor else 0
