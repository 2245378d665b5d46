"""What processes say to each other: messages of msgpack, the secret that they share, and how things end.

A message is two frames: [protocol, number, kind], and a body of plain values. Nothing here knows of JAX.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack
import zmq
from zmq.utils import z85

from jorca.config import ConfigError
from jorca.request import JorcaError

PROTOCOL: Final = 1
"""Version of the messages. That a header is [protocol, number, kind] holds in all versions."""
_MIN_SECRET_BYTES: Final = 16


class HandshakeError(JorcaError):
    """Two processes do not belong together: another secret, version, model or option."""


class ProcessLost(JorcaError):
    """A process has died, hangs, has failed or has diverged; the message names it."""


class Message(NamedTuple):
    """What a peer said.

    Attributes:
      process: Who said it.
      kind: What kind of message it is.
      body: Plain values: None, bool, int, float, str, bytes, lists and dicts of them.
    """

    process: int
    kind: str
    body: Any


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """What all processes of a group know and nobody else does.

    Attributes:
      data: At least 16 bytes; random ones, since whoever guesses them is in.
    """

    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) < _MIN_SECRET_BYTES:
            raise ConfigError(
                f"the secret must have at least {_MIN_SECRET_BYTES} bytes, got {len(self.data)}; "
                "`openssl rand -hex 32` prints a good one"
            )

    @classmethod
    def from_file(cls, path: str | Path) -> Secret:
        """Reads a secret from a file; white space at its ends does not count.

        Raises:
          ConfigError: The file cannot be read, or the secret is too short.
        """
        try:
            return cls(Path(path).read_bytes().strip())
        except OSError as error:
            raise ConfigError(f"secret_file {path} cannot be read: {error.strerror}") from error

    def master_keys(self) -> tuple[bytes, bytes]:
        """Returns the master's public and secret key, in ZeroMQ's printable form."""
        secret_key = z85.encode(hmac.digest(self.data, b"jorca control master", hashlib.sha256))
        return zmq.curve_public(secret_key), secret_key


def encode(number: int, kind: str, body: Any) -> list[bytes]:
    """Returns the frames of a message."""
    return [encode_header(number, kind), encode_body(body)]


def encode_header(number: int, kind: str) -> bytes:
    """Returns the first frame of a message."""
    return encode_body([PROTOCOL, number, kind])


def encode_body(body: Any) -> bytes:
    """Returns the second frame of a message."""
    packed = msgpack.packb(body)
    assert packed is not None  # the buffer is msgpack's own
    return packed


def decode(frames: list[bytes]) -> tuple[int, int, str, Any]:
    """Returns protocol, number, kind and body of a message.

    Raises:
      ValueError: The frames are no message; whatever they hold, nothing else is raised and nothing is run.
    """
    try:
        header, body = frames
        protocol, number, kind = msgpack.unpackb(header)
        if type(protocol) is not int or type(number) is not int or type(kind) is not str:
            raise ValueError("a header is two integers and a string")
        return protocol, number, kind, msgpack.unpackb(body)
    except Exception as error:  # msgpack raises several, which its own documentation does not all name
        raise ValueError(f"not a message: {error!r}") from error
