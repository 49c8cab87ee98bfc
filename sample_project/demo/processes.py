"""Starts, watches and stops the processes of a run; none of them outlives it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

MARK_VARIABLE: Final = "OUTBOX_DEMO_RUN"
_ROOT: Final = Path(__file__).resolve().parent.parent.parent


class DemoFailed(Exception):
    """The demo cannot continue; the end of the file `log` shows why."""

    def __init__(self, message: str, *, log: Path | None = None) -> None:
        super().__init__(message)
        self.log = log


class Services:
    """The processes of one run. Each has a session and a log file of its own."""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self.logs = logs
        self._mark = uuid.uuid4().hex
        self._environment = {**os.environ, **environment, MARK_VARIABLE: self._mark, "PYTHONUNBUFFERED": "1"}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def log(self, name: str) -> Path:
        """The log file of a service."""
        return self.logs / f"{name}.log"

    def start(self, name: str, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> int:
        """Start `python -m module arguments…`; returns its process id."""
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=_ROOT,
                env={**self._environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running[name] = process
        return process.pid

    def run(
        self,
        name: str,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        timeout_seconds: float = 60.0,
        accept: Collection[int] = (0,),
    ) -> None:
        """Run `python -m module arguments…` to its end; DemoFailed unless its exit code is in `accept`."""
        self.start(name, module, *arguments, environment=environment)
        try:
            code = self._running[name].wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"{name} did not end within {timeout_seconds:.0f} s", log=self.log(name)) from None
        del self._running[name]
        if code not in accept:
            raise DemoFailed(f"{name} ended with exit code {code}", log=self.log(name))

    def end(self, name: str, *, grace_seconds: float = 60.0) -> None:
        """Ask a service to end, and wait for it; DemoFailed if it does not end by itself."""
        process = self._running[name]
        process.terminate()
        try:
            process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            raise DemoFailed(
                f"{name} did not end within {grace_seconds:.0f} s of SIGTERM", log=self.log(name)
            ) from None
        del self._running[name]

    def check_alive(self) -> None:
        """Raise DemoFailed if a service has ended by itself."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise DemoFailed(f"{name} ended by itself ({process.returncode})", log=self.log(name))

    def wait_until(self, condition: Callable[[], bool], *, what: str, log: str, within_seconds: float) -> None:
        """Wait for a condition while all services run; DemoFailed when the time is over."""
        pause = threading.Event()
        deadline = time.monotonic() + within_seconds
        while not condition():
            self.check_alive()
            if time.monotonic() > deadline:
                raise DemoFailed(f"{what} did not happen within {within_seconds:.0f} s", log=self.log(log))
            pause.wait(0.1)

    def stop(self, *, grace_seconds: float = 20.0) -> list[int]:
        """Ask all processes to end, wait, and kill the remaining ones. Returns the killed ones."""
        for process in self._running.values():
            process.terminate()
        deadline = time.monotonic() + grace_seconds
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        killed = sorted(marked(self._mark))
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._running.values():
            process.kill()
            process.wait()
        self._running.clear()
        return killed


def marked(mark: str) -> Iterator[int]:
    """The processes of this machine that carry a run's mark (none if there is no /proc)."""
    needle = f"{MARK_VARIABLE}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def child_of(parent: int, *words: str) -> int | None:
    """The child process of `parent` whose command line contains all words."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The fields after the command's name, which is in brackets and may contain spaces: state, parent.
            ancestor = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if ancestor == parent and all(any(word in argument for argument in arguments) for word in words):
                return int(folder.name)
    return None


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Lock a directory for one run at a time; DemoFailed if another run has it."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "demo.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoFailed(
                f"another demo is running in {directory}: end it, or set OUTBOX_DEMO_DIR to another directory"
            ) from None
        yield


def tail(path: Path, lines: int = 25) -> Sequence[str]:
    """The last lines of a log file."""
    return path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []
