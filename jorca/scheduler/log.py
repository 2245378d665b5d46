"""A record of the scheduler's calls, as JSON lines, and running one again.

The first line holds the limits and the policy with its options; every other line is one call, in order,
with what it was given, and for `plan` with what it returned. Since decisions depend on nothing else, a
fresh scheduler that is given the same calls plans the same iterations.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

from jorca.request import JorcaError, Request, SamplingParams, TokenLogprobs
from jorca.scheduler.iteration import Event, Iteration, StepResult
from jorca.scheduler.limits import SchedulerLimits
from jorca.scheduler.policy import Policy, make_policy
from jorca.scheduler.scheduler import Scheduler

VERSION = 1
"""Of the log's format."""


class ReplayError(JorcaError, ValueError):
    """A log cannot be read, or running it again gave something else; the message names the line."""


class RecordingScheduler(Scheduler):
    """A scheduler that writes down its calls.

    Args:
      limits: As for `Scheduler`.
      policy: As for `Scheduler`.
      write: Takes each line, line end included; the `write` of a text file, say.
    """

    def __init__(
        self, limits: SchedulerLimits, policy: Policy | None = None, *, write: Callable[[str], object]
    ) -> None:
        super().__init__(limits, policy)
        self._write = write
        self._record(
            "start",
            version=VERSION,
            policy=self.policy.name,
            options=dict(self.policy.options),
            limits=dataclasses.asdict(limits),
        )

    def submit(self, request: Request, now: float) -> None:
        """Submits, and records it unless it is refused, which leaves no trace. See `Scheduler.submit`."""
        super().submit(request, now)
        self._record("submit", now=now, request=request_to_dict(request))

    def plan(self) -> Iteration | None:
        """Plans, and records the iteration or that there is none. See `Scheduler.plan`."""
        iteration = super().plan()
        self._record("plan", iteration=None if iteration is None else iteration.to_dict())
        return iteration

    def commit(self, iteration: Iteration, result: StepResult, now: float) -> list[Event]:
        """Commits, and records the result. See `Scheduler.commit`."""
        events = super().commit(iteration, result, now)
        self._record("commit", now=now, result=result.to_dict())
        return events

    def abort(self, request_id: str) -> Event | None:
        """Aborts, and records it. See `Scheduler.abort`."""
        event = super().abort(request_id)
        self._record("abort", request_id=request_id)
        return event

    def restart(self) -> list[Event]:
        """Restarts, and records it. See `Scheduler.restart`."""
        events = super().restart()
        self._record("restart")
        return events

    def _record(self, call: str, **arguments: Any) -> None:
        self._write(json.dumps({"call": call, **arguments}, separators=(",", ":")) + "\n")


def replay(lines: Iterable[str], policy: Policy | None = None) -> Scheduler:
    """Runs a log again on a fresh scheduler and checks that it plans the same iterations.

    Args:
      lines: A log from its first line on; a text file, say. It may end after any line.
      policy: A fresh one like that of the log; None makes it by the name and the options in the log.

    Returns:
      The scheduler as it is after the last call.

    Raises:
      ReplayError: At the first line that cannot be read or carried out, or whose iteration is not the
        one that is planned now.
    """
    scheduler: Scheduler | None = None
    iterations: dict[int, Iteration] = {}
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if scheduler is None:
                scheduler = _start(entry, policy)
            else:
                _repeat(scheduler, entry, iterations)
        except (ReplayError, AssertionError, KeyError, TypeError, ValueError) as error:
            raise ReplayError(f"log line {number}: {_reason(error)}") from error
    if scheduler is None:
        raise ReplayError("the log is empty; its first line must be a start")
    return scheduler


def request_to_dict(request: Request) -> dict[str, Any]:
    """Returns `request` as plain values, fit for JSON, without the fields that have their default."""
    data = _changed_fields(request)
    if "params" in data:
        data["params"] = _changed_fields(request.params)
    if "output_logprobs" in data:
        data["output_logprobs"] = [[p.logprob, p.top] for p in request.output_logprobs]
    return data


def request_from_dict(data: dict[str, Any]) -> Request:
    """Inverse of `request_to_dict`.

    Raises:
      TypeError: `data` has a field that requests do not have.
      ValueError: A value breaks its field's rule.
    """
    params = SamplingParams(**data.get("params", {}))
    logprobs = (TokenLogprobs(p, tuple(map(tuple, top))) for p, top in data.get("output_logprobs", ()))
    return Request(**{**data, "params": params, "output_logprobs": tuple(logprobs)})


def _changed_fields(record: Any) -> dict[str, Any]:
    values = ((f, getattr(record, f.name)) for f in dataclasses.fields(record))
    return {f.name: list(v) if isinstance(v, tuple) else v for f, v in values if v != f.default}


def _start(entry: dict[str, Any], policy: Policy | None) -> Scheduler:
    """Makes the scheduler that the first line of a log describes."""
    if entry["call"] != "start" or entry["version"] != VERSION:
        raise ReplayError(f"the log must begin with a start of version {VERSION}, not with {entry}")
    if policy is None:
        policy = make_policy(entry["policy"], **entry["options"])
    for what, ours, theirs in (
        ("policy", policy.name, entry["policy"]),
        ("options", dict(policy.options), entry["options"]),
    ):
        if ours != theirs:
            raise ReplayError(f"{what} is {ours!r}, but the log was made with {theirs!r}")
    return Scheduler(SchedulerLimits(**entry["limits"]), policy)


def _repeat(scheduler: Scheduler, entry: dict[str, Any], iterations: dict[int, Iteration]) -> None:
    """Makes one call again; `iterations` are those in flight, by number."""
    match entry["call"]:
        case "submit":
            scheduler.submit(request_from_dict(entry["request"]), entry["now"])
        case "plan":
            logged = entry["iteration"]
            planned = scheduler.plan()
            _compare(planned, None if logged is None else Iteration.from_dict(logged))
            if planned is not None:
                iterations[planned.seq] = planned
        case "commit":
            result = StepResult.from_dict(entry["result"])
            if result.seq not in iterations:
                raise ReplayError(f"iteration {result.seq} is committed, but is not in flight")
            scheduler.commit(iterations.pop(result.seq), result, entry["now"])
        case "abort":
            scheduler.abort(entry["request_id"])
        case "restart":
            scheduler.restart()
            iterations.clear()
        case other:
            raise ReplayError(f"there is no call {other!r}")


def _compare(planned: Iteration | None, logged: Iteration | None) -> None:
    """Raises ReplayError with the first difference, if there is one."""
    if planned == logged:
        return
    if planned is None or logged is None:
        planned_seq, logged_seq = (i and f"iteration {i.seq}" for i in (planned, logged))
        raise ReplayError(f"plan gave {planned_seq}, the log has {logged_seq}")
    if planned.seq != logged.seq:
        raise ReplayError(f"plan gave iteration {planned.seq}, the log has iteration {logged.seq}")
    for i, (ours, theirs) in enumerate(zip(planned.items, logged.items, strict=False)):
        for name, a, b in zip(ours._fields, ours, theirs, strict=True):
            if a != b:
                raise ReplayError(f"iteration {planned.seq}, item {i}: {name} is {a!r}, the log has {b!r}")
    counts = len(planned.items), len(logged.items)
    raise ReplayError("iteration {} has {} items, the log has {}".format(planned.seq, *counts))


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
