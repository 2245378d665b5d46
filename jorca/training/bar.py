"""What a run shows while it trains: a progress bar, and a line for each look at the validation part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import rich.console
import rich.progress

from jorca.training.run import Progress

_SMOOTHED: Final = 20
"""Updates over which the loss that is shown is averaged."""


class TrainingBar:
    """A progress bar with the loss; a context manager that shows it.

    Args:
      console: Where it is shown.
      steps: Updates in all.
      progress: How far the run is, and its losses so far.
      bytes_per_token: Turns losses into nats per byte.
    """

    def __init__(
        self, console: rich.console.Console, steps: int, progress: Progress, bytes_per_token: float
    ) -> None:
        self._progress = progress
        self._bytes_per_token = bytes_per_token
        self._bars = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[loss]}"),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=console,
        )
        self._updates = self._bars.add_task("updates", total=steps, completed=progress.steps, loss="")

    def __enter__(self) -> TrainingBar:
        """Starts to show the bar."""
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the bar as it stands."""
        self._bars.stop()

    def update(self) -> None:
        """Shows the updates done so far."""
        self._bars.update(self._updates, completed=self._progress.steps, loss=self._loss())

    @contextmanager
    def validation(self, num_tokens: int) -> Iterator[Callable[[int], None]]:
        """Shows a second bar while the validation part is read, and a line after it.

        Args:
          num_tokens: Tokens of the validation part.

        Yields:
          What to call with the number of tokens that have been read since the last call.
        """
        reading = self._bars.add_task("validation", total=num_tokens, loss="")
        yield lambda advance: self._bars.advance(reading, advance)
        self._bars.remove_task(reading)
        done, nats = self._progress.validation[-1]
        self._bars.console.print(f"{done} updates: {self._loss()}, validation {nats:.4f}")

    def _loss(self) -> str:
        latest = self._progress.losses[-_SMOOTHED:]
        return f"training {sum(latest) / len(latest) / self._bytes_per_token:.4f} nats per byte"
