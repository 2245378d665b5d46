"""Latency against throughput: the points of the paper's figure 10, what they say, and the figure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jorca._plot import check_can_draw

_STYLES = {
    "orca": ("tab:blue", "o"),
    "request-level": ("tab:red", "s"),
    "shortest-prompt": ("tab:gray", "^"),
}


class Served(NamedTuple):
    """How a job fared."""

    arrival_s: float
    finished_s: float
    num_output: int

    @property
    def normalized_latency_s(self) -> float:
        """Seconds from arrival to the last token, per generated token."""
        return (self.finished_s - self.arrival_s) / self.num_output


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One measurement: a policy at one offered rate.

    Attributes:
      policy: A key of `POLICIES`.
      max_batch_size: Most requests in an iteration.
      offered_rps: Requests per second that arrived; None if all arrived at once.
      num_requests: How many in all.
      throughput_rps: Requests per second from the first arrival to the last token.
      tokens_per_s: Generated tokens per second, likewise.
      median_ms: Median normalized latency, in milliseconds per generated token.
      p90_ms: Its 90th percentile.
    """

    policy: str
    max_batch_size: int
    offered_rps: float | None
    num_requests: int
    throughput_rps: float
    tokens_per_s: float
    median_ms: float
    p90_ms: float

    @classmethod
    def of(cls, served: Sequence[Served], **fields: Any) -> Point:
        """Summarises what was served."""
        seconds = max(s.finished_s for s in served) - min(s.arrival_s for s in served)
        median_ms, p90_ms = np.percentile([1e3 * s.normalized_latency_s for s in served], [50, 90]).tolist()
        return cls(
            num_requests=len(served),
            throughput_rps=len(served) / seconds,
            tokens_per_s=sum(s.num_output for s in served) / seconds,
            median_ms=median_ms,
            p90_ms=p90_ms,
            **fields,
        )


def throughput_at(points: Sequence[Point], median_ms: float) -> float:
    """Returns the highest throughput whose median normalized latency is within `median_ms`, in req/s.

    Args:
      points: Of one policy and batch size. Between neighbours in offered rate the curve is a straight line.
      median_ms: The limit, in milliseconds per token.

    Returns:
      Requests per second; 0 if even the lowest rate was slower.
    """
    curve = sorted((p for p in points if p.offered_rps is not None), key=lambda p: p.offered_rps or 0)
    best = max((p.throughput_rps for p in curve if p.median_ms <= median_ms), default=0.0)
    for a, b in itertools.pairwise(curve):
        if min(a.median_ms, b.median_ms) <= median_ms < max(a.median_ms, b.median_ms):
            share = (median_ms - a.median_ms) / (b.median_ms - a.median_ms)
            best = max(best, a.throughput_rps + share * (b.throughput_rps - a.throughput_rps))
    return best


def summary(points: Sequence[Point], target_ms: float) -> dict[str, Any]:
    """Compares the best of each policy: at equal median normalized latency, and at their peaks.

    Args:
      points: All that was measured.
      target_ms: The latency at which throughputs are compared, in milliseconds per token.

    Returns:
      Per policy, over its batch sizes, the best throughput within the target and at the peak, in req/s; and
      for every policy but "orca", by what factor "orca" is better, None where the other reached nothing.
    """
    at_target, peak = dict[str, float](), dict[str, float]()
    for policy in dict.fromkeys(p.policy for p in points):
        mine = [p for p in points if p.policy == policy]
        sizes = {p.max_batch_size for p in mine}
        at_target[policy] = max(
            throughput_at([p for p in mine if p.max_batch_size == size], target_ms) for size in sizes
        )
        peak[policy] = max(p.throughput_rps for p in mine)

    def factors(rates: Mapping[str, float]) -> dict[str, float | None]:
        others = {name: rate for name, rate in rates.items() if name != "orca" and "orca" in rates}
        return {name: rates["orca"] / rate if rate else None for name, rate in others.items()}

    return {
        "target_ms": target_ms,
        "rps_at_target": at_target,
        "peak_rps": peak,
        "factor_at_target": factors(at_target),
        "factor_at_peak": factors(peak),
    }


def draw(points: Sequence[Point], target_ms: float, path: Path, title: str) -> None:
    """Draws median normalized latency against throughput, as figure 10 does, into an image file.

    Args:
      points: All that was measured; a line for each policy and batch size.
      target_ms: Drawn as a dashed line.
      path: The file; its ending names the format.
      title: What stands above.
    """
    check_can_draw()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys((p.policy, p.max_batch_size) for p in points))
    sizes = sorted({size for _, size in names})
    for policy, size in names:
        mine = [p for p in points if (p.policy, p.max_batch_size) == (policy, size) and p.offered_rps]
        mine.sort(key=lambda p: p.offered_rps or 0)
        color, marker = _STYLES[policy]
        axes.plot(
            [p.throughput_rps for p in mine],
            [p.median_ms for p in mine],
            color=color,
            marker=marker,
            markersize=4,
            alpha=(1 + sizes.index(size)) / len(sizes),
            label=f"{policy} ({size})",
        )
    axes.axhline(target_ms, color="black", linewidth=0.8, linestyle="--")
    axes.set(xlabel="throughput (req/s)", ylabel="median latency per token (ms)", yscale="log", title=title)
    axes.grid(alpha=0.3, which="both")
    axes.legend(title="policy (max_batch_size)")
    figure.savefig(path, dpi=120)
