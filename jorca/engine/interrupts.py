"""Ctrl-C at a moment of our choosing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

try:  # the same functions without the search for an enum, which takes twenty times as long
    from _signal import getsignal as _get_handler  # pyright: ignore[reportMissingImports]
    from _signal import signal as _set_handler  # pyright: ignore[reportMissingImports]
except ImportError:  # not CPython
    from signal import getsignal as _get_handler
    from signal import signal as _set_handler

_SIGINT: Final = int(signal.SIGINT)


class Uninterrupted:
    """Holds Ctrl-C (SIGINT) back while a `with` block runs, so that no account is left half written.

    What the signal would have done, usually to raise KeyboardInterrupt, it does when the block is left.
    Blocks may lie in each other; the outermost counts. Threads but the main one are never interrupted.

    Args:
      wake: Called, in a signal's handler, when one is held back: what the block waits for may be broken off.

    Attributes:
      depth: How many blocks are open.
    """

    def __init__(self, wake: Callable[[], None]):
        self.depth = 0
        self._wake = wake
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._held: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if self.depth == 0 and threading.get_ident() == threading.main_thread().ident:
            handler = _get_handler(_SIGINT)
            if callable(handler):
                self._handler = handler
                _set_handler(_SIGINT, self._hold)
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.depth -= 1
        if self.depth or self._handler is None:
            return
        handler, self._handler = self._handler, None
        _set_handler(_SIGINT, handler)
        held, self._held = self._held, None
        if held is not None:
            handler(*held)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held = number, frame
        self._wake()
