"""A picture of which requests shared which iterations, drawn in the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rich.console import Group
from rich.text import Text

from jorca.request import RequestOutput
from jorca.scheduler import Iteration

_PROMPT, _TOKEN, _WAITING = "█", "▪", "·"


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
      num_fed: Tokens fed in all.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self.num_iterations = 0
        self.num_fed = 0

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
        self.num_fed += iteration.num_tokens

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
        room = width - indent - max(map(len, answers.values()), default=0) - 4
        columns = min(self.num_iterations, max(room, 1))
        ruler = "".join(str(c // 10 % 10) if c % 10 == 0 else " " for c in range(columns))
        rows = [Text(f"{'':{indent}}  {ruler}  tens of iterations", style="dim")]
        for request_id, line in self._lines.items():
            row = Text(f"{labels[request_id]:>{indent}}  ")
            for column in range(columns):
                row.append(*_cell(line, column))
            row.append(f"  {answers.get(request_id, '')}")
            rows.append(row)
        sizes = [sum(c in line.fed for line in self._lines.values()) for c in range(columns)]
        rows.append(
            Text(f"{'':{indent}}  {''.join(map(_digit, sizes))}  requests in the iteration", style="dim")
        )
        legend = Text("", style="dim")
        legend.append(_PROMPT, "green").append(" prompt   ").append(_TOKEN, "cyan").append(
            " one more token   "
        )
        legend.append(_WAITING, "yellow").append(" waiting for room in the batch")
        rows.append(legend)
        if columns < self.num_iterations:
            rows.append(Text(f"{self.num_iterations - columns} more iterations do not fit", style="dim"))
        return Group(*rows)


def _cell(line: _Line, column: int) -> tuple[str, str]:
    fed = line.fed.get(column)
    if fed is not None:
        return (_TOKEN, "cyan") if column > min(line.fed) else (_PROMPT, "green")
    waiting = column >= line.submitted and (not line.fed or column < min(line.fed))
    return (_WAITING, "yellow") if waiting else (" ", "")


def _digit(number: int) -> str:
    """Returns one character for a batch size: 0 to 9, then letters, then a plus."""
    return "0123456789abcdefghijklmnopqrstuvwxyz"[number] if number < 36 else "+"
