"""The control channel between processes: small messages in order, checked, apart from tensors.

Process 0, the master, binds a ZeroMQ ROUTER and every other process, a worker, connects a DEALER. Each side
numbers what it sends to a peer, from 0 and without gaps, so nothing is lost, repeated or reordered unnoticed.
Each says something at least every `heartbeat_s`; who is silent for three times as long, killed or stopped,
is lost.

Encryption and authentication are CURVE's (CurveZMQ, ZeroMQ RFC 26). The master's key pair is derived from the
secret, and its public half is never sent: who does not know the secret can neither shake hands with the
master nor stand in for it. What strangers send is dropped by ZeroMQ; that they came is logged.

Nothing here knows of JAX.
"""

from __future__ import annotations

import contextlib
import logging
import socket as sockets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import zmq

from jorca.config import ConfigError
from jorca.sharding.channel import LEAVE_S, Channel, Link
from jorca.sharding.messages import PROTOCOL, HandshakeError, Message, ProcessLost, Secret, decode, encode

_logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES: Final = 2**30


class MasterChannel(Channel):
    """Process 0's end.

    Args:
      address: HOST:PORT to listen at; port 0 takes any that is free.
      secret: What all processes know.
      num_processes: The master and its workers.
      facts: What must be the same in all processes, as plain values by name.
      heartbeat_s: Seconds between signs of life.
      receive: Called with each message of a worker, in this channel's thread; must not wait.
      lost: Called once, likewise, when a worker is lost. The other workers have been told to stop.

    Attributes:
      address: HOST:PORT that is listened at.
    """

    def __init__(
        self,
        address: str,
        secret: Secret,
        *,
        num_processes: int,
        facts: Mapping[str, Any],
        heartbeat_s: float,
        receive: Callable[[Message], None],
        lost: Callable[[ProcessLost], None],
    ):
        self._num_processes, self._facts = num_processes, decode(encode(0, "", dict(facts)))[3]
        self._refusal: str | None = None
        self._joined = threading.Condition()
        socket = _make_socket(zmq.ROUTER)
        socket.set(zmq.ROUTER_MANDATORY, 1)  # to be told of a peer that is not there any more
        socket.curve_server = True
        socket.curve_secretkey = secret.master_keys()[1]
        host, _, port = address.rpartition(":")
        try:
            number = sockets.gethostbyname(host)
            socket.bind(f"tcp://{number}:{port if port != '0' else '*'}")
        except (OSError, zmq.ZMQError) as error:
            socket.context.destroy(linger=0)
            raise ConfigError(
                f"control must be an address of this host with a free port, got {address} ({error})"
            ) from error
        bound = socket.get_string(zmq.LAST_ENDPOINT).strip("\0")
        self.address = bound.removeprefix("tcp://")
        super().__init__(socket, heartbeat_s=heartbeat_s, receive=receive, lost=lost)

    def wait_for_workers(self, timeout_s: float) -> None:
        """Returns when every worker has come.

        Raises:
          HandshakeError: One does not belong here, has failed, or is missing after so many seconds.
        """

        def done() -> bool:
            is_over = self._refusal is not None or self._error is not None
            return is_over or len(self._links) == self._num_processes - 1

        with self._joined:
            in_time = self._joined.wait_for(done, timeout_s)
        if self._error is not None:  # the others have been told
            self.close()
            raise HandshakeError(str(self._error))
        if self._refusal is None and in_time:
            return
        missing = sorted(set(range(1, self._num_processes)) - set(self._links))
        reason = self._refusal or f"processes {missing} have not come within {timeout_s:g} s"
        self._tell_all("stop", reason)
        self.close()
        time.sleep(1)  # so that the others have said why before this process takes JAX's coordinator away
        raise HandshakeError(reason)

    def fail(self, why: str) -> None:
        """Ends the group because process 0 itself cannot go on."""
        self._end(ProcessLost(f"process 0 has failed: {why}"))

    def give_up(self, number: int, waited_s: float) -> None:
        """Ends the group because somebody's progress has not come to `number`; the error names who it is."""
        with self._lock:
            progress = {0: self.progress} | {process: link.progress for process, link in self._links.items()}
        late = [str(process) for process, reached in sorted(progress.items()) if reached < number]
        who = f"process {late[0]} has" if len(late) == 1 else f"processes {', '.join(late) or 'unknown'} have"
        self._end(
            ProcessLost(
                f"{who} not finished iteration {number} within {waited_s:g} s: a device or a transfer hangs"
            )
        )

    def close(self) -> None:
        """Lets the workers go, gives them ten seconds to leave, and closes the socket."""
        if self._error is None:
            self._tell_all("bye", None)
        super().close()

    def _tell_all(self, kind: str, body: Any) -> None:
        with self._lock:
            if self._leave_by_s is None:
                self._post(kind, body, self._links)

    def _note(self, event: zmq.Event) -> None:
        if event == zmq.Event.DISCONNECTED and self._leave_by_s is None:
            _logger.warning(
                "a connection to the control port has ended: what came was not of this protocol or made with "
                "another secret, and was ignored; or a process has left"
            )
            self._next_beat_s = (
                time.monotonic() + 0.1
            )  # sending to it, once ZeroMQ has forgotten it, shows who it was

    def _take(self, frames: list[bytes]) -> None:
        identity, *rest = frames
        try:
            protocol, number, kind, body = decode(rest)
        except ValueError as error:
            _logger.warning("ignored %d bytes on the control port: %s", sum(map(len, rest)), error)
            return
        for process, link in self._links.items():
            if link.address == [identity]:
                self._follow(process, link, number, kind, body)
                return
        self._greet(identity, protocol, number, kind, body)

    def _greet(self, identity: bytes, protocol: int, number: int, kind: str, body: Any) -> None:
        """Takes a worker in, or says why not."""
        process = body.get("process") if isinstance(body, dict) else None
        if (number, kind) != (0, "hello") or type(process) is not int:
            _logger.warning("ignored a %r message of a stranger on the control port", kind)
            return
        link = Link([identity], time.monotonic(), num_heard=1)
        refusal = self._judge(process, protocol, body.get("facts"))
        with self._lock:
            if refusal is not None:
                self._try_send([identity, *encode(0, "refuse", refusal)])
            else:
                self._links[process] = link
                self._post("welcome", None, (process,))
        with self._joined:
            if refusal is not None:
                _logger.error("%s", refusal)
                self._refusal = refusal
            self._joined.notify_all()

    def _judge(self, process: int, protocol: int, facts: Any) -> str | None:
        """Returns why a worker cannot be taken, or None."""
        if protocol != PROTOCOL:
            return f"process {process} speaks control protocol {protocol}, process 0 speaks {PROTOCOL}"
        if process in self._links or not 0 < process < self._num_processes:
            return (
                f"process_id must be another in each of {self._num_processes} processes, got {process} again"
            )
        theirs = facts if isinstance(facts, dict) else {}
        differ = [
            f"{name} is {theirs.get(name)!r} there and {self._facts.get(name)!r} in process 0"
            for name in sorted(self._facts.keys() | theirs.keys())
            if theirs.get(name) != self._facts.get(name)
        ]
        return f"process {process} does not fit: " + "; ".join(differ) if differ else None

    def _end(self, error: ProcessLost) -> None:
        with self._lock:
            if self._error is not None or self._leave_by_s is not None:
                return
            self._error = error
            self._post("stop", str(error), self._links)
            self._leave_by_s = time.monotonic() + LEAVE_S
        with self._joined:
            self._joined.notify_all()
        self._lost(error)


class WorkerChannel(Channel):
    """A worker's end.

    Args:
      address: HOST:PORT of the master.
      secret: What all processes know.
      process: The number of this process.
      facts: As for the master.
      heartbeat_s: Seconds between signs of life.
      receive: Called with each message of the master, in this channel's thread; must not wait. The kind
        "bye" says that the work is done.
      lost: Called once, likewise, when the master is lost or tells to stop; the channel is closed by then.
    """

    def __init__(
        self,
        address: str,
        secret: Secret,
        *,
        process: int,
        facts: Mapping[str, Any],
        heartbeat_s: float,
        receive: Callable[[Message], None],
        lost: Callable[[ProcessLost], None],
    ):
        self._address = address
        self._answer: str | None = None  # "" is a welcome
        self._answered = threading.Event()
        self._has_failed = False
        socket = _make_socket(zmq.DEALER)
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = secret.master_keys()[0]
        socket.connect(f"tcp://{address}")
        socket.send_multipart(encode(0, "hello", {"process": process, "facts": dict(facts)}))
        super().__init__(socket, heartbeat_s=heartbeat_s, receive=receive, lost=lost)

    def wait_for_master(self, timeout_s: float) -> None:
        """Returns when the master has taken this process in.

        Raises:
          HandshakeError: It refuses, or does not answer within so many seconds.
        """
        if not self._answered.wait(timeout_s):
            self._answer = f"process 0 has not answered at {self._address} within {timeout_s:g} s"
        if self._answer:
            self.close()
            raise HandshakeError(self._answer)

    def fail(self, error: str) -> None:
        """Tells the master that this process has failed, and closes; `lost` is not called any more."""
        self._has_failed = True
        with contextlib.suppress(ProcessLost):
            self.send("failed", error)
        self._mark_gone()
        self.close()

    def close(self) -> None:
        """Tells the master that this process leaves, and closes the socket."""
        with self._lock:
            if self._leave_by_s is None:
                self._post("gone", None, self._links)
        self._mark_gone()
        super().close()

    def _mark_gone(self) -> None:
        for link in self._links.values():
            link.gone = True  # nobody is waited for; the socket's linger sees to the last message

    def _note(self, event: zmq.Event) -> None:
        if event == zmq.Event.DISCONNECTED:
            for link in self._links.values():
                link.cut = True
        if str(event.name).startswith("HANDSHAKE_FAILED") and not self._answered.is_set():
            self._set_answer(
                f"the handshake with {self._address} failed: is that process 0's control address, and is the "
                "secret in its secret_file the same?"
            )

    def _set_answer(self, answer: str) -> None:
        if not self._answered.is_set():
            self._answer = answer
            self._answered.set()

    def _take(self, frames: list[bytes]) -> None:
        try:
            _, number, kind, body = decode(frames)
        except ValueError as error:
            _logger.warning("ignored %d bytes of process 0: %s", sum(map(len, frames)), error)
            return
        if kind == "refuse":
            return self._set_answer(f"process 0 refuses: {body}")
        if not self._links:
            if (number, kind) == (0, "welcome"):
                with self._lock:
                    self._links[0] = Link([], time.monotonic(), num_sent=1, num_heard=1)
                self._set_answer("")
            return None
        if kind == "stop":
            return self._end(ProcessLost(str(body)))
        return self._follow(0, self._links[0], number, kind, body)

    def _end(self, error: ProcessLost) -> None:
        with self._lock:
            if self._error is not None or self._leave_by_s is not None:
                return
            self._error = error
            self._post("gone", None, self._links)
            self._leave_by_s = time.monotonic()
        self._mark_gone()

    def _shut(self) -> None:
        super()._shut()
        if self._error is not None and not self._has_failed:
            self._lost(self._error)


def _make_socket(kind: int) -> zmq.Socket[bytes]:
    """Returns a socket with a context of its own that never drops a message for want of room."""
    socket = zmq.Context().socket(kind)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    socket.set(zmq.LINGER, 0)
    return socket
