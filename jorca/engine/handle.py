"""Reading the outputs of some requests, in any order with others, or not at all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from jorca.engine.engine import Engine
from jorca.output import Mailbox, RequestOutput
from jorca.request import Request, RequestRejected


class Handle(Iterator[RequestOutput]):
    """Requests that belong together: submits them, and gives their outputs as they come.

    Whoever asks for the next output drives the loop, for everybody's requests; so handles may be read in any
    order, in turns and inside each other. Of what was not read in the meantime, the outputs of a request are
    joined. A handle that is closed, or that nobody holds any more, aborts what is unfinished.

    Args:
      engine: What runs them.
      requests: Requests with seeds; `n` is not looked at.

    Raises:
      RequestRejected: One can never run; then none has been run.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request]):
        self._engine = engine
        self._mailbox = Mailbox()
        self._unfinished: set[str] = set()
        try:
            for request in requests:
                self._submit(request)
        except BaseException:
            self.close()
            raise

    def _submit(self, request: Request) -> None:
        self._unfinished.add(request.id)
        try:
            self._engine.submit(request, self._mailbox)
        except RequestRejected as error:
            raise RequestRejected(f"{request.id}: {error}") from error

    def __next__(self) -> RequestOutput:
        """Returns the next output of any of the requests; a request's last one says so.

        Raises:
          StopIteration: All have ended.
          JorcaError: The engine has stopped.
        """
        while (output := self._mailbox.take()) is None:
            if not self._unfinished:
                raise StopIteration
            self._engine.advance()
        if output.finished:
            self._unfinished.discard(output.request_id)
        return output

    def close(self) -> None:
        """Aborts what is unfinished; nothing more comes. May be called at any moment, and again."""
        self._engine.drop(self._unfinished, self._mailbox)
        self._unfinished = set()
        self._mailbox = Mailbox()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and getattr(self, "_unfinished", None):
            self._engine.drop(self._unfinished, self._mailbox)
