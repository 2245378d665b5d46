"""A record of the scheduler's calls, as JSON lines, and running one again.

The first line holds all that a scheduler is made of: the limits, the policy and the memory with their
options. Every other line is one call, in order, with its time and what it was given; for `plan` with the
iteration, which names who is admitted, and for the others with who was released. Since decisions depend on
nothing else, a fresh scheduler that is given the same calls plans the same iterations.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

from jorca.request import JorcaError, Request
from jorca.scheduler.iteration import Event, Iteration, StepResult
from jorca.scheduler.limits import SchedulerLimits
from jorca.scheduler.memory import Memory, make_memory
from jorca.scheduler.policy import Policy, make_policy
from jorca.scheduler.scheduler import Scheduler
from jorca.wire import request_from_dict, request_to_dict

VERSION = 2
"""Of the log's format. Version 1 had neither admissions nor releases, and no memory."""


class ReplayError(JorcaError, ValueError):
    """A log cannot be read, or running it again gave something else; the message names the line."""


class RecordingScheduler(Scheduler):
    """A scheduler that writes down its calls.

    Args:
      limits: As for `Scheduler`.
      policy: As for `Scheduler`.
      memory: As for `Scheduler`.
      write: Takes each line, line end included; the `write` of a text file, say.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: Policy | None = None,
        memory: Memory | None = None,
        *,
        write: Callable[[str], object],
    ) -> None:
        super().__init__(limits, policy, memory)
        self._write = write
        self._record(
            "start",
            version=VERSION,
            policy=_described(self.policy),
            memory=_described(self.memory),
            limits=dataclasses.asdict(limits),
        )

    def submit(self, request: Request, now: float) -> None:
        """Submits, and records it unless it is refused, which leaves no trace. See `Scheduler.submit`."""
        super().submit(request, now)
        self._record("submit", now=now, request=request_to_dict(request))

    def plan(self, now: float = 0.0) -> Iteration | None:
        """Plans, and records the iteration or that there is none. See `Scheduler.plan`."""
        iteration = super().plan(now)
        self._record("plan", now=now, iteration=None if iteration is None else iteration.to_dict())
        return iteration

    def commit(self, iteration: Iteration, result: StepResult, now: float) -> list[Event]:
        """Commits, and records the result and who was released. See `Scheduler.commit`."""
        released = len(self._pool.released)
        events = super().commit(iteration, result, now)
        self._record("commit", now=now, result=result.to_dict(), released=self._pool.released[released:])
        return events

    def abort(self, request_id: str, now: float = 0.0) -> Event | None:
        """Aborts, and records it and who was released. See `Scheduler.abort`."""
        released = len(self._pool.released)
        event = super().abort(request_id, now)
        self._record("abort", now=now, request_id=request_id, released=self._pool.released[released:])
        return event

    def restart(self, now: float = 0.0) -> list[Event]:
        """Restarts, and records it and who was released. See `Scheduler.restart`."""
        released = len(self._pool.released)
        events = super().restart(now)
        self._record("restart", now=now, released=self._pool.released[released:])
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


def _described(part: Policy | Memory) -> dict[str, Any]:
    return {"name": part.name, "options": dict(part.options)}


def _start(entry: dict[str, Any], policy: Policy | None) -> Scheduler:
    """Makes the scheduler that the first line of a log describes."""
    if entry["call"] != "start" or entry["version"] != VERSION:
        got = f"version {entry['version']}; record it anew" if entry["call"] == "start" else entry
        raise ReplayError(f"the log must begin with a start of version {VERSION}, got {got}")
    limits, logged = SchedulerLimits(**entry["limits"]), entry["policy"]
    if policy is None:
        policy = make_policy(logged["name"], **logged["options"])
    for what, ours in _described(policy).items():
        if ours != logged[what]:
            raise ReplayError(f"the policy's {what} is {ours!r}, the log was made with {logged[what]!r}")
    memory = make_memory(entry["memory"]["name"], limits, **entry["memory"]["options"])
    return Scheduler(limits, policy, memory)


def _repeat(scheduler: Scheduler, entry: dict[str, Any], iterations: dict[int, Iteration]) -> None:
    """Makes one call again; `iterations` are those in flight, by number."""
    now = entry["now"]
    match entry["call"]:
        case "submit":
            scheduler.submit(request_from_dict(entry["request"]), now)
        case "plan":
            logged = entry["iteration"]
            planned = scheduler.plan(now)
            _compare(planned, None if logged is None else Iteration.from_dict(logged))
            if planned is not None:
                iterations[planned.seq] = planned
        case "commit":
            result = StepResult.from_dict(entry["result"])
            if result.seq not in iterations:
                raise ReplayError(f"iteration {result.seq} is committed, but is not in flight")
            scheduler.commit(iterations.pop(result.seq), result, now)
        case "abort":
            scheduler.abort(entry["request_id"], now)
        case "restart":
            scheduler.restart(now)
            iterations.clear()
        case other:
            raise ReplayError(f"there is no call {other!r}")
    released = [list(release) for release in scheduler.take_released()]
    if released != entry.get("released", []):
        raise ReplayError(f"{entry['call']} released {released}, the log has {entry.get('released')}")


def _compare(planned: Iteration | None, logged: Iteration | None) -> None:
    """Raises ReplayError with the first difference, if there is one."""
    if planned == logged:
        return
    if planned is None or logged is None:
        planned_seq, logged_seq = (i and f"iteration {i.seq}" for i in (planned, logged))
        raise ReplayError(f"plan gave {planned_seq}, the log has {logged_seq}")
    if planned.seq != logged.seq:
        raise ReplayError(f"plan gave iteration {planned.seq}, the log has iteration {logged.seq}")
    for what, mine, logs in (
        ("item", planned.items, logged.items),
        ("admission", planned.admitted, logged.admitted),
    ):
        for i, (ours, theirs) in enumerate(zip(mine, logs, strict=False)):
            for name, a, b in zip(ours._fields, ours, theirs, strict=True):
                if a != b:
                    raise ReplayError(
                        f"iteration {planned.seq}, {what} {i}: {name} is {a!r}, the log has {b!r}"
                    )
        if len(mine) != len(logs):
            raise ReplayError(f"iteration {planned.seq} has {len(mine)} {what}s, the log has {len(logs)}")


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
