"""One end of a control channel: a thread that listens, keeps time, and tells who is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import select
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from jorca.request import JorcaError
from jorca.sharding.messages import Message, ProcessLost, encode_body, encode_header

_logger = logging.getLogger(__name__)

SILENT_BEATS: Final = 3
"""A peer that has said nothing for so many heartbeats is lost."""
LEAVE_S: Final = 10.0
"""How long peers that live may take to answer a good-bye."""
_LINGER_MS: Final = 2000
"""How long the last messages may take to leave this process."""


@dataclasses.dataclass(slots=True)
class Link:
    """The way to one peer.

    Attributes:
      address: The frame that leads to it, if one is needed.
      heard_s: When it spoke last.
      num_sent: Messages that it was sent.
      num_heard: Messages that it has sent.
      progress: How far it was at its last sign of life.
      cut: Whether its connection has ended.
      gone: Whether it has said good-bye, or is lost: nothing more is sent to it or expected.
    """

    address: list[bytes]
    heard_s: float
    num_sent: int = 0
    num_heard: int = 0
    progress: int = -1
    cut: bool = False
    gone: bool = False


class Channel:
    """What master and worker share: a thread that listens, keeps time and closes the socket in the end.

    Any thread may send: the socket is used under a lock, and the thread is woken if sending has swallowed the
    signal that something has arrived (ZeroMQ's descriptor tells of changes only).

    Attributes:
      progress: How far this process is; peers learn of it with its signs of life.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        *,
        heartbeat_s: float,
        receive: Callable[[Message], None],
        lost: Callable[[ProcessLost], None],
    ):
        self._socket, self._monitor = socket, socket.get_monitor_socket()
        self._heartbeat_s = heartbeat_s
        self._receive, self._lost = receive, lost
        self.progress = -1
        self._links: dict[int, Link] = {}
        self._lock = threading.Lock()
        self._error: ProcessLost | None = None
        self._leave_by_s: float | None = None
        self._next_beat_s = time.monotonic()
        self._wake_in, self._wake_out = sockets.socketpair()
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="jorca-control", daemon=True)
        self._thread.start()

    def send(self, kind: str, body: Any = None, process: int | None = None) -> None:
        """Sends a message to a peer, or to all; never waits for them.

        Raises:
          ProcessLost: A process has been lost; nothing is sent any more.
        """
        with self._lock:
            if self._leave_by_s is not None:
                raise self._error or JorcaError("the control channel is closed")
            self._post(kind, body, self._links if process is None else (process,))
            arrived = self._socket.poll(0)
            is_cut = any(link.cut for link in self._links.values())
        if arrived or is_cut:
            self._wake()

    def close(self) -> None:
        """Says good-bye, gives peers that live ten seconds to answer it, and closes the socket."""
        with self._lock:
            if self._leave_by_s is None:
                self._leave_by_s = time.monotonic() + LEAVE_S
        self._wake()
        self._thread.join()

    def _post(self, kind: str, body: Any, processes: Iterable[int]) -> None:
        packed = encode_body(body)
        for link in map(self._links.__getitem__, processes):
            if not link.gone:
                frames = [*link.address, encode_header(link.num_sent, kind), packed]
                link.cut |= not self._try_send(frames)
                link.num_sent += 1

    def _try_send(self, frames: list[bytes]) -> bool:
        """Returns whether the peer is still connected, as far as ZeroMQ knows."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # closed already
            self._wake_in.send(b"\0")

    def _run(self) -> None:
        poll = select.poll()
        for source in (self._socket, self._monitor, self._wake_out):
            poll.register(source.fileno(), select.POLLIN)
        while not self._may_leave():
            with self._lock:
                arrived = self._socket.poll(0)
            if not arrived:
                poll.poll(max(self._next_beat_s - time.monotonic(), 0) * 1000)
            with contextlib.suppress(BlockingIOError):
                self._wake_out.recv(4096)
            self._drain()
            if (now := time.monotonic()) >= self._next_beat_s:
                self._beat()
                self._next_beat_s = now + self._heartbeat_s
            self._look_for_lost(now)
        self._shut()

    def _may_leave(self) -> bool:
        if self._leave_by_s is None:
            return False
        return time.monotonic() > self._leave_by_s or all(link.gone for link in self._links.values())

    def _shut(self) -> None:
        with self._lock:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=_LINGER_MS)
            self._socket.context.term()  # waits for what is still to be sent
        self._wake_in.close()
        self._wake_out.close()

    def _beat(self) -> None:
        with self._lock:
            self._post("beat", self.progress, self._links)

    def _look_for_lost(self, now: float) -> None:
        limit_s = SILENT_BEATS * self._heartbeat_s
        for process, link in self._links.items():
            if link.gone:
                continue
            if link.cut:
                self._lose(process, "has closed its connection: it has died, or cannot be reached")
            elif now - link.heard_s > limit_s:
                self._lose(
                    process, f"has been silent for {limit_s:g} s: it has died, is stopped or out of reach"
                )

    def _drain(self) -> None:
        """Takes in all that has arrived."""
        while self._monitor.poll(0):
            self._note(zmq.Event(int(recv_monitor_message(self._monitor)["event"])))
        while True:
            with self._lock:
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    return
            self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _note(self, event: zmq.Event) -> None:
        """Is told what happens to connections."""

    def _follow(self, process: int, link: Link, number: int, kind: str, body: Any) -> None:
        """Takes a message of a known peer if it is the next one."""
        link.heard_s = time.monotonic()
        if number != link.num_heard:
            what = "repeats" if number < link.num_heard else "leaves a gap after"
            last = number if number < link.num_heard else link.num_heard - 1
            return self._lose(process, f"sent control message {number}, which {what} message {last}")
        link.num_heard += 1
        if kind == "gone":
            link.gone = True
        elif kind == "failed":
            self._lose(process, f"has failed: {body}")
        elif kind == "beat":
            link.progress = body
        else:
            self._hear(Message(process, kind, body))
        return None

    def _hear(self, message: Message) -> None:
        try:
            self._receive(message)
        except Exception as error:
            _logger.exception("a %s message was not understood", message.kind)
            self._lose(message.process, f"sent a {message.kind} message that was not understood: {error!r}")

    def _lose(self, process: int, why: str) -> None:
        self._end(ProcessLost(f"process {process} {why}"))
        self._links[process].gone = True  # it is not waited for

    def _end(self, error: ProcessLost) -> None:
        """Notes the first loss, after which nothing is sent or received any more but good-byes."""
        raise NotImplementedError
