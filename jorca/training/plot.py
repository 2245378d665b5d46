"""The loss curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jorca._plot import check_can_draw


def draw_losses(
    train: Sequence[float], validation: Sequence[tuple[int, float]], path: str | Path, title: str
) -> None:
    """Draws the losses against the updates into an image file.

    Args:
      train: Nats per byte of each update's batch; drawn smoothed over a fiftieth of the run.
      validation: (updates done, nats per byte), in order.
      path: The file; its ending names the format.
      title: What stands above.

    Raises:
      ConfigError: matplotlib is not installed; the message says how to install it.
    """
    check_can_draw()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    span = max(len(train) // 50, 1)
    smooth = np.convolve(train, np.ones(span) / span, mode="valid")
    axes.plot(np.arange(len(smooth)) + span, smooth, linewidth=1, label="training, with dropout")
    if validation:
        axes.plot(*zip(*validation, strict=True), marker="o", markersize=4, label="validation")
    axes.set(xlabel="updates", ylabel="nats per byte", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
