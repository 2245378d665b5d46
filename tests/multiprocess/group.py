"""Starting several processes of one engine on this machine, and seeing how they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NODE = Path(__file__).with_name("node.py")
ROOT = Path(__file__).parents[2]
PATIENCE_S = 240


class Process:
    """One of them: what it has said on standard output, line by line, and its log."""

    def __init__(self, command: list[str], folder: Path, name: str):
        self.name = name
        self.log = folder / f"{name}.log"
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": paths},
            )
        self.lines: list[Any] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._changed:
                if line.startswith('["'):  # JAX's collectives print lines of their own
                    self.lines.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        """Kills it if it is still there."""
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        self._reader.join()
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        assert self.popen.stdin is not None
        self.popen.stdin.close()

    def said(self, what: str) -> list[Any]:
        """All values that it has said under a name."""
        return [line[1] for line in self.lines if line[0] == what]

    def wait_for(self, what: str) -> bool:
        """Waits until it says something; False if it ends before."""
        with self._changed:
            self._changed.wait_for(lambda: self.said(what) or not self._reader.is_alive(), PATIENCE_S)
        return bool(self.said(what))


class Group:
    """Processes that share one engine.

    Args:
      folder: For logs and the secret.
      number: How many.
      task: What `node.py` does; "options" are the LLM's, to which the group's own are added.
      change: Options that differ in one process, by its number.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        task: dict[str, Any],
        *,
        change: dict[int, dict[str, Any]] | None = None,
    ):
        folder.mkdir(exist_ok=True)
        secret = folder / "secret"
        secret.write_text(os.urandom(32).hex())
        self.control = f"127.0.0.1:{free_port()}"
        self.options = {
            "coordinator": f"127.0.0.1:{free_port()}",
            "control": self.control,
            "num_processes": number,
            "secret_file": str(secret),
            "heartbeat_s": 1.0,
            "start_timeout_s": 120,
        }
        self.processes = []
        for index in range(number):
            options = task["options"] | self.options | {"process_id": index} | (change or {}).get(index, {})
            command = [str(NODE), json.dumps(task | {"options": options})]
            self.processes.append(Process([sys.executable, *command], folder, f"process-{index}"))
        self.master = self.processes[0]

    def wait(self) -> list[int]:
        """Waits for all to end; returns their exit statuses."""
        deadline = time.monotonic() + PATIENCE_S
        try:
            return [p.popen.wait(max(deadline - time.monotonic(), 0.1)) for p in self.processes]
        except subprocess.TimeoutExpired as error:
            for process in self.processes:
                process.popen.send_signal(signal.SIGUSR1)  # prints where its threads are
            time.sleep(1)
            raise AssertionError(f"a process hangs\n{self.report()}") from error

    def report(self) -> str:
        """Everything that they have said and logged."""
        return "\n".join(
            f"--- {p.name}: status {p.popen.poll()}, said {p.lines}\n{p.log.read_text(errors='replace')}"
            for p in self.processes
        )

    def kill(self) -> None:
        for process in self.processes:
            process.end()


@contextlib.contextmanager
def group(*args: Any, **kwargs: Any) -> Iterator[Group]:
    """Makes a `Group`, and kills what is left of it at the end."""
    made = Group(*args, **kwargs)
    try:
        yield made
    finally:
        made.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
