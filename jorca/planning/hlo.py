"""What a compiled program does, read from the text of its optimised HLO."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Final

COLLECTIVES: Final = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""Operations that exchange data between devices."""

_KERNELS: Final = {"triton": "__gpu$xla.gpu.triton", "mosaic": "mosaic_gpu"}
"""How the custom calls of Pallas kernels begin."""

_OPERATION: Final = re.compile(
    rf"^ .*? = (.+?) ({'|'.join((*COLLECTIVES, 'copy', 'custom-call'))})(-start)?\(([^)]*)\)"
    r'(?:.*? custom_call_target="([^"]*)")?'
)
_SHAPE: Final = re.compile(r"\w+\[[\d,]*\]")


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One copy, exchange or custom call. What is asynchronous counts once.

    Attributes:
      kind: "copy", "custom-call" or one of `COLLECTIVES`.
      shapes: What it makes on one device, as in "f16[64,2048]". More than one where the compiler has combined
        exchanges.
      target: What a custom call calls; empty for others.
      in_entry: Whether it stands in the entry computation, outside of branches, loops and fusions.
    """

    kind: str
    shapes: tuple[str, ...]
    target: str
    in_entry: bool


def read_operations(text: str) -> tuple[Operation, ...]:
    """Returns the copies, exchanges and custom calls of a compiled program.

    Args:
      text: Of its HLO, as `as_text()` gives it.
    """
    operations, in_entry = [], False
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            in_entry = line.startswith("ENTRY")
        elif match := _OPERATION.match(line):
            made, kind, start, operands, target = match.groups()
            shapes = _SHAPE.findall(made)
            if start:  # its result lists what goes in as well: first, and for a copy last
                shapes = shapes[:1] if kind == "copy" else shapes[-operands.count("%") :]
            operations.append(Operation(kind, tuple(shapes), target or "", in_entry))
    return tuple(operations)


def count_launches(operations: Iterable[Operation], backend: str) -> int:
    """Returns how often a program launches a Pallas kernel of the backend "triton" or "mosaic"."""
    return sum(op.target.startswith(_KERNELS[backend]) for op in operations)
