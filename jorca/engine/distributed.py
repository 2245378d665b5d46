"""The engine master's side of many processes: one message per iteration goes out, tokens come back.

As in Orca, numbers that steer go over a channel of their own and tensors go from device to device. The master
sends each packed iteration once to every worker and starts its own stages at once, as every worker does when
the message comes; nobody waits for a device to do so. All processes start iterations, and the stages of each,
in the same order, on which transfers between them depend.

A process that is lost, fails or diverges takes its part of the KV arrays with it: the group has ended. The
master tells the others to leave and raises `ProcessLost` from then on; a launcher starts all of them again.
"""

from __future__ import annotations

import atexit
import collections
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax

from jorca.config import HostsConfig
from jorca.engine.executor import LocalExecutor, Outputs, Ticket, read_outputs
from jorca.engine.packing import PackedBatch
from jorca.engine.wire import RunningDigest, batch_to_plain, outputs_from_plain
from jorca.request import JorcaError
from jorca.scheduler import StepResult
from jorca.sharding.control import MasterChannel
from jorca.sharding.hosts import EXIT_FAILED, EXIT_LOST, leave
from jorca.sharding.messages import HandshakeError, Message, ProcessLost, Secret

_logger = logging.getLogger(__name__)

VERDICT_S: Final = 3.0
"""How long a process that sees something fail waits to be told that another one is the cause."""
_GRACE_S: Final = 5.0
"""How long starting an iteration may go on when a process has been lost, before it is taken to hang."""


Inbox = queue.SimpleQueue[Message | ProcessLost]


class Master:
    """Process 0's dealings with its workers.

    Args:
      hosts: How the processes find each other.
      facts: What must be the same in all of them (see `jorca.engine.wire.group_facts`).

    Attributes:
      loss: The error once a process is lost, else None.
      on_loss: Called with it, in the channel's thread; must not wait.

    Raises:
      HandshakeError: A worker is missing, or does not belong here.
    """

    def __init__(self, hosts: HostsConfig, facts: Mapping[str, Any]):
        assert hosts.secret_file is not None  # HostsConfig wants one with a coordinator
        self.loss: ProcessLost | None = None
        self.on_loss: Callable[[ProcessLost], None] | None = None
        self._is_lost = threading.Event()
        self._status = EXIT_LOST
        self._inbox: Inbox = queue.SimpleQueue()
        self._num_workers = jax.process_count() - 1
        self._channel = MasterChannel(
            hosts.control_address,
            Secret.from_file(hosts.secret_file),
            num_processes=jax.process_count(),
            facts=facts,
            heartbeat_s=hosts.heartbeat_s,
            receive=lambda message: self._inbox.put(message),
            lost=self._lose,
        )
        atexit.register(self.close)
        try:
            self._channel.wait_for_workers(hosts.start_timeout_s)
        except HandshakeError:
            atexit.register(leave, EXIT_FAILED)
            raise

    def send(self, kind: str, body: Any = None) -> None:
        """Sends a message to every worker.

        Raises:
          ProcessLost: Nothing is sent any more.
        """
        self._channel.send(kind, body)

    @property
    def inbox(self) -> Inbox:
        """Where messages come in, until `forget`."""
        return self._inbox

    def receive(self, kind: str, inbox: Inbox | None = None) -> Message:
        """Waits for the next message, which is of that kind.

        Args:
          kind: What is expected.
          inbox: Where; None is where messages come in now. An older one has none but the news of that.

        Raises:
          ProcessLost: It will not come.
        """
        message = (self._inbox if inbox is None else inbox).get()
        if isinstance(message, ProcessLost):
            raise message
        if message.kind != kind:
            raise self.fail(f"expected {kind!r} of process {message.process}, which sent {message.kind!r}")
        return message

    def gather(self, kind: str) -> list[Any]:
        """Waits for a message of that kind from each worker; returns their bodies."""
        return [self.receive(kind).body for _ in range(self._num_workers)]

    def agree(self, free_bytes: int | None) -> int | None:
        """Returns the least of what the devices of all processes have left; None if one does not know."""
        all_free = [free_bytes, *self.gather("free")]
        known = [free for free in all_free if free is not None]
        agreed = min(known) if len(known) == len(all_free) else None
        self.send("free", agreed)
        return agreed

    def forget(self) -> None:
        """Ends all waiting for messages in other threads, and begins with an empty inbox."""
        old, self._inbox = self._inbox, queue.SimpleQueue()
        old.put(ProcessLost("nobody waits for this message any more"))

    def fail(self, why: str) -> ProcessLost:
        """Ends the group, as this process cannot go on; returns the error to raise."""
        if self.wait_for_verdict() is None:
            self._status = EXIT_FAILED
            self._channel.fail(why)
        assert self.loss is not None
        return self.loss

    def note_progress(self, seq: int) -> None:
        """Notes that this process has done its part of an iteration."""
        self._channel.progress = seq

    def give_up(self, seq: int, waited_s: float) -> None:
        """Ends the group, as an iteration does not come back."""
        self._channel.give_up(seq, waited_s)

    def wait_for_verdict(self) -> ProcessLost | None:
        """Gives the channel the time to see whether a process is lost, after something has failed here.

        What a lost process leaves undone fails in the others, and they may see that first.
        """
        self._is_lost.wait(VERDICT_S)
        return self.loss

    def close(self) -> None:
        """Lets the workers go. After a loss this ends the process: JAX could not shut down."""
        self._channel.close()
        if self.loss is not None:
            leave(self._status)

    def _lose(self, error: ProcessLost) -> None:
        _logger.error("%s", error)
        self.loss = error
        self._is_lost.set()
        self._inbox.put(error)
        if self.on_loss is not None:
            self.on_loss(error)


class _Session:
    """What belongs to the iterations between two resets. Whoever still collects an older one finds only that.

    Attributes:
      inbox: Where workers' messages come in.
      tokens: The digest of what came back.
      returned: What the workers are to be told of it with the next iteration.
      oldest: The iteration that is being collected, and since when.
    """

    def __init__(self, inbox: Inbox):
        self.inbox = inbox
        self.tokens = RunningDigest()
        self.returned: collections.deque[tuple[int, bytes]] = collections.deque()
        self.oldest: tuple[int, float] | None = None


class DistributedExecutor:
    """Runs iterations on the devices of several processes, of which this one is the master.

    Args:
      local: Runs the stages of this process.
      master: Where the other processes are reached.
      has_outputs: Whether this process has a part of the last stage, and so all outputs.
      timeout_s: How long the oldest iteration may take before the group is given up: a device can hang while
        its process goes on giving signs of life.
    """

    def __init__(self, local: LocalExecutor, master: Master, *, has_outputs: bool, timeout_s: float):
        self.local = local
        self._master = master
        self._has_outputs = has_outputs
        self._plan = RunningDigest()
        self._session = _Session(master.inbox)
        self._starting = threading.Lock()
        self._timeout_s = timeout_s
        self._closed = threading.Event()
        threading.Thread(target=self._watch_oldest, name="jorca-watch", daemon=True).start()

    def watch_loss(self, fail: Callable[[ProcessLost], None]) -> None:
        """Has `fail` called when a process is lost, and ends this process should it hang for that."""

        def lose(error: ProcessLost) -> None:
            fail(error)
            threading.Thread(target=self._leave_if_stuck, name="jorca-loss", daemon=True).start()

        self._master.on_loss = lose
        if self._master.loss is not None:  # in the meantime
            lose(self._master.loss)

    def dispatch(self, packed: PackedBatch) -> tuple[_Session, Ticket]:
        """Sends an iteration to the workers and starts it here.

        Raises:
          ProcessLost: A process has been lost, or this one could not start what the others have.
        """
        with self._starting:
            session = self._session
            returned = [session.returned.popleft() for _ in range(len(session.returned))]
            body = batch_to_plain(packed) | {"plan": self._plan.add_plan(packed), "returned": returned}
            self._master.send("iteration", body)
            try:
                return session, self.local.dispatch(packed)
            except Exception as error:
                raise self._master.fail(repr(error)) from error

    def collect(self, ticket: tuple[_Session, Ticket]) -> StepResult:
        """Waits for the tokens, from here or from the process that has them.

        Raises:
          ProcessLost: They will not come; or what failed here did so because of a process that is lost.
        """
        session, started = ticket
        seq = started.packed.iteration.seq
        if session is not self._session:
            raise JorcaError(f"iteration {seq} was given up")
        session.oldest = seq, time.monotonic()
        try:
            outputs = self.local.fetch(started)
            self._master.note_progress(seq)
            if not self._has_outputs:
                outputs = self._receive(session, seq)
        except ProcessLost:
            raise
        except Exception as error:
            if (loss := self._master.wait_for_verdict()) is not None:
                raise loss from error
            raise
        finally:
            session.oldest = None
        session.returned.append((seq, session.tokens.add_tokens(seq, outputs)))
        return read_outputs(started.packed, outputs)

    def _receive(self, session: _Session, seq: int) -> Outputs:
        while True:
            body = self._master.receive("outputs", session.inbox).body
            if body["seq"] >= seq:  # else of an iteration that was given up
                assert body["seq"] == seq
                return outputs_from_plain(body["outputs"])

    def reset(self) -> None:
        """Has every process begin anew, after an iteration has failed here.

        Raises:
          ProcessLost: A process has been lost; there is no going on.
        """
        if self._master.loss is not None:
            raise self._master.loss
        with self._starting:
            self._master.forget()
            self._session = _Session(self._master.inbox)
            self._master.send("reset")
            self.local.reset()

    def close(self) -> None:
        """Lets the workers go, which end their processes, and gives back what is held here."""
        self._closed.set()
        if self._master.loss is None:  # else this process ends, too, as soon as it has told why
            self._master.close()
        self.local.close()

    def _watch_oldest(self) -> None:
        while self._master.loss is None and not self._closed.wait(min(1.0, self._timeout_s / 4)):
            oldest = self._session.oldest
            if oldest is not None and time.monotonic() - oldest[1] > self._timeout_s:
                return self._master.give_up(oldest[0], self._timeout_s)

    def _leave_if_stuck(self) -> None:
        """Ends this process if starting an iteration waits for a lost one: no error could be told then."""
        if not self._starting.acquire(timeout=_GRACE_S):
            _logger.error("%s; this process hangs for that, and leaves", self._master.loss)
            leave(EXIT_LOST)
        self._starting.release()
