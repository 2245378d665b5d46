"""A process that works for an engine master: it holds no scheduler and starts what it is told to."""

from __future__ import annotations

import atexit
import collections
import logging
import queue
import sys
import threading
import time
from typing import Any, NoReturn

import jax

from jorca.config import EngineConfig, ModelConfig
from jorca.engine.build import BuiltStages, Weights, build_stages
from jorca.engine.distributed import VERDICT_S
from jorca.engine.executor import LocalExecutor, Ticket
from jorca.engine.wire import RunningDigest, batch_from_plain, group_facts, outputs_to_plain
from jorca.request import JorcaError
from jorca.sharding.control import WorkerChannel
from jorca.sharding.hosts import EXIT_FAILED, EXIT_LOST, leave
from jorca.sharding.messages import HandshakeError, Message, ProcessLost, Secret

_logger = logging.getLogger(__name__)


class Diverged(JorcaError):
    """This process and the master have not run, or not sampled, the same."""


def work(
    model: ModelConfig, weights: Weights, config: EngineConfig, *, show_progress: bool = False
) -> NoReturn:
    """Works for process 0 until that is done, then exits with status 0.

    Exits with `EXIT_LOST` when another process is lost, and with `EXIT_FAILED` when this one fails.

    Args:
      model: As for `jorca.engine.build.build_engine`, like the others.
      weights: Of them, only those of this process's stages are used.
      config: The engine's options; they must be those of process 0.
      show_progress: Whether compiling draws a progress bar.

    Raises:
      HandshakeError: Process 0 cannot be reached, or this process does not belong to it.
    """
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    hosts = config.hosts
    assert hosts.secret_file is not None  # HostsConfig wants one with a coordinator
    channel = WorkerChannel(
        hosts.control_address,
        Secret.from_file(hosts.secret_file),
        process=jax.process_index(),
        facts=group_facts(model, config),
        heartbeat_s=hosts.heartbeat_s,
        receive=inbox.put,
        lost=_leave_lost,
    )
    try:
        channel.wait_for_master(hosts.start_timeout_s)
    except HandshakeError:
        atexit.register(leave, EXIT_FAILED)
        raise

    def agree(free_bytes: int | None) -> int | None:
        channel.send("free", free_bytes)
        if (message := inbox.get()).kind != "free":
            raise JorcaError(f"it expected what memory is free and was sent {message.kind!r}")
        return message.body

    try:
        built = build_stages(model, weights, config, agree=agree, show_progress=show_progress)
        channel.send("ready")
        _run(inbox, channel, built)
        jax.distributed.shutdown()  # before process 0 does, which ends everybody else's JAX
        channel.close()
    except (Exception, KeyboardInterrupt) as error:
        _fail(channel, error)
    sys.exit(0)


def _run(inbox: queue.SimpleQueue[Message], channel: WorkerChannel, built: BuiltStages) -> None:
    """Does what the master says, in the order in which it says it, until it says good-bye."""
    plan = RunningDigest()
    returns = _Returns(built.executor, channel, is_sender=built.sender == jax.process_index())
    while (message := inbox.get()).kind != "bye":
        body = message.body
        if message.kind == "reset":
            returns.leave_behind()
            built.executor.reset()
            returns = _Returns(built.executor, channel, is_sender=returns.is_sender)
        elif message.kind == "iteration":
            packed = batch_from_plain(body, built.sizes.ladder)
            if plan.add_plan(packed) != body["plan"]:
                seq = packed.iteration.seq
                raise Diverged(f"it has diverged: its plan of iteration {seq} is not process 0's")
            returns.put(built.executor.dispatch(packed), body["returned"])
        else:
            raise JorcaError(f"it knows no control message of kind {message.kind!r}")


class _Returns:
    """Waits for what was started, in a thread of its own, and holds the tokens against the master's.

    Args:
      executor: Where iterations were started.
      channel: Where outputs and failures go.
      is_sender: Whether the master has the outputs from this process.
    """

    def __init__(self, executor: LocalExecutor, channel: WorkerChannel, *, is_sender: bool):
        self.is_sender = is_sender
        self._executor, self._channel = executor, channel
        self._started: queue.SimpleQueue[tuple[Ticket, list[Any]]] = queue.SimpleQueue()
        self._current = True
        threading.Thread(target=self._wait, name="jorca-returns", daemon=True).start()

    def put(self, ticket: Ticket, returned: list[Any]) -> None:
        """Hands over an iteration that was started, and the master's digests of those that it collected."""
        self._started.put((ticket, returned))

    def leave_behind(self) -> None:
        """Forgets every iteration that was handed over."""
        self._current = False

    def _wait(self) -> None:
        digest = RunningDigest()
        mine: collections.deque[tuple[int, bytes]] = collections.deque()
        try:
            while True:
                ticket, returned = self._started.get()
                outputs = self._executor.fetch(ticket)
                if not self._current:
                    return
                self._channel.progress = ticket.packed.iteration.seq
                if not outputs:
                    continue
                # What the master has collected was started before, so that its digest is here.
                for seq, theirs in returned:
                    if mine.popleft() != (seq, theirs):
                        raise Diverged(f"it has diverged: its tokens of iteration {seq} are not process 0's")
                seq = ticket.packed.iteration.seq
                mine.append((seq, digest.add_tokens(seq, outputs)))
                if self.is_sender:
                    self._channel.send("outputs", {"seq": seq, "outputs": outputs_to_plain(outputs)})
        except ProcessLost:
            return  # the channel tells, and ends this process
        except Exception as error:
            if self._current:
                _fail(self._channel, error)


def _leave_lost(error: ProcessLost) -> None:
    _logger.error("%s; this process leaves, start all of them again", error)
    leave(EXIT_LOST)


def _fail(channel: WorkerChannel, error: BaseException) -> NoReturn:
    _logger.error("this process has failed", exc_info=error)
    if not isinstance(error, JorcaError):
        time.sleep(VERDICT_S)  # if another process is the cause, this one is told so and leaves
    channel.fail(str(error) if isinstance(error, JorcaError) else repr(error))
    leave(EXIT_FAILED)
