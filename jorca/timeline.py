"""A picture of which requests shared which iterations, drawn in the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rich.console import Group
from rich.text import Text

from jorca.output import RequestOutput
from jorca.scheduler import Iteration

_PROMPT, _TOKEN, _WAITING = "█", "■", "·"
_SIZES = "requests in it"


@dataclasses.dataclass(slots=True)
class _Line:
    """One request: when it came, and what it fed in each of its iterations."""

    submitted: int
    fed: dict[int, int] = dataclasses.field(default_factory=dict)
    end: RequestOutput | None = None


class Timeline:
    """Watches an engine (`engine.observe(timeline)`) and draws what it saw.

    Attributes:
      num_iterations: Iterations seen.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self.num_iterations = 0

    def submitted(self, request_id: str) -> None:
        """Notes that a request has come, so that its waiting can be drawn."""
        self._lines[request_id] = _Line(self.num_iterations)

    def __call__(self, iteration: Iteration, outputs: list[RequestOutput]) -> None:
        """Notes who took part in an iteration, and who left after it."""
        for item in iteration.items:
            line = self._lines.setdefault(item.request_id, _Line(iteration.seq))
            line.fed[self.num_iterations] = item.num_tokens
        for output in outputs:
            if output.finished:
                self._lines[output.request_id].end = output
        self.num_iterations += 1

    @property
    def mean_batch_size(self) -> float:
        """Requests in an iteration, on average."""
        shared = sum(len(line.fed) for line in self._lines.values())
        return shared / self.num_iterations if self.num_iterations else 0.0

    def picture(
        self, label: Callable[[str], str], answer: Callable[[RequestOutput], str], width: int
    ) -> Group:
        """Draws a line per request and a column per iteration.

        Args:
          label: What stands before a request's line, by its id.
          answer: What stands behind it, by its final output.
          width: Columns of the terminal; iterations that do not fit are left out on the right, and a
            last line says how many.
        """
        labels = {request_id: label(request_id) for request_id in self._lines}
        indent = max(map(len, labels.values()), default=0)
        answers = {i: answer(line.end) for i, line in self._lines.items() if line.end is not None}
        room = max(width - indent - max(map(len, [_SIZES, *answers.values()])) - 4, 1)
        cell = 2 if 2 * self.num_iterations <= room else 1
        columns = range(min(self.num_iterations, room))

        ticks = "".join(f"{c:<{5 * cell}}" for c in columns if c % 5 == 0)[: len(columns) * cell]
        rows = [_row("", indent, [(f"{ticks:<{len(columns) * cell}}", "dim")], "iteration")]
        for request_id, line in self._lines.items():
            cells = [_cell(line, column) for column in columns]
            drawn = [(mark * cell, style) for mark, style in cells]
            rows.append(_row(labels[request_id], indent, drawn, answers.get(request_id, "")))
        sizes = [sum(c in line.fed for line in self._lines.values()) for c in columns]
        rows.append(_row("", indent, [(f"{_digit(n):<{cell}}", "dim") for n in sizes], _SIZES))
        rows.append(_legend())
        if len(columns) < self.num_iterations:
            rows.append(Text(f"{self.num_iterations - len(columns)} more iterations do not fit", style="dim"))
        return Group(*rows)


def _row(label: str, indent: int, cells: list[tuple[str, str]], end: str) -> Text:
    row = Text(f"{label:>{indent}}  ", no_wrap=True)
    for text, style in cells:
        row.append(text, style)
    return row.append(f"  {end}")


def _legend() -> Text:
    legend = Text(style="dim")
    legend.append(_PROMPT, "green").append(" its prompt   ").append(_TOKEN, "cyan").append(
        " one more token   "
    )
    return legend.append(_WAITING, "yellow").append(" waiting for room in the batch")


def _cell(line: _Line, column: int) -> tuple[str, str]:
    fed = line.fed.get(column)
    if fed is not None:
        return (_TOKEN, "cyan") if column > min(line.fed) else (_PROMPT, "green")
    waiting = column >= line.submitted and (not line.fed or column < min(line.fed))
    return (_WAITING, "yellow") if waiting else (" ", "")


def _digit(number: int) -> str:
    """Returns one character for a batch size: 0 to 9, then letters, then a plus."""
    return "0123456789abcdefghijklmnopqrstuvwxyz"[number] if number < 36 else "+"
