"""When requests run: Algorithm 1, page accounting and the messages of an iteration."""

from jorca.scheduler.iteration import Admission, Event, Item, ItemResult, Iteration, Release, StepResult
from jorca.scheduler.limits import SchedulerLimits
from jorca.scheduler.log import RecordingScheduler, ReplayError, replay
from jorca.scheduler.memory import Memory, Reservation, make_memory
from jorca.scheduler.policy import Orca, Policy, RequestLevel, make_policy, policy_of
from jorca.scheduler.pool import Pool
from jorca.scheduler.scheduler import Scheduler

__all__ = [
    "Admission",
    "Event",
    "Item",
    "ItemResult",
    "Iteration",
    "Memory",
    "Orca",
    "Policy",
    "Pool",
    "RecordingScheduler",
    "Release",
    "ReplayError",
    "RequestLevel",
    "Reservation",
    "Scheduler",
    "SchedulerLimits",
    "StepResult",
    "make_memory",
    "make_policy",
    "policy_of",
    "replay",
]
