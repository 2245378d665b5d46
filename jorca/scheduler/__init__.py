"""When requests run: Algorithm 1, page accounting and the messages of an iteration."""

from jorca.scheduler.iteration import Event, Item, ItemResult, Iteration, StepResult
from jorca.scheduler.limits import SchedulerLimits
from jorca.scheduler.log import RecordingScheduler, ReplayError, replay, request_from_dict, request_to_dict
from jorca.scheduler.memory import Memory, Reservation
from jorca.scheduler.policy import Orca, Policy, RequestLevel, make_policy
from jorca.scheduler.pool import Pool
from jorca.scheduler.scheduler import Scheduler

__all__ = [
    "Event",
    "Item",
    "ItemResult",
    "Iteration",
    "Memory",
    "Orca",
    "Policy",
    "Pool",
    "RecordingScheduler",
    "ReplayError",
    "RequestLevel",
    "Reservation",
    "Scheduler",
    "SchedulerLimits",
    "StepResult",
    "make_policy",
    "replay",
    "request_from_dict",
    "request_to_dict",
]
