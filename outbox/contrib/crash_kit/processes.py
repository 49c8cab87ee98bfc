"""Child processes of a test, by fork: they have the application as the test has prepared it."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outbox.errors import UsageError

_TAIL_CHARACTERS: Final = 4000


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child process ended. `log`: the end of what it has printed."""

    status: int
    in_time: bool
    log: str

    @property
    def was_killed(self) -> bool:
        """Whether the process was killed at its step."""
        return self.in_time and self.status == -signal.SIGKILL

    @property
    def finished(self) -> bool:
        """Whether the function has returned."""
        return self.in_time and self.status == 0


def run_in_child(function: Callable[[], None], *, log: Path, within_seconds: float) -> Ended:
    """Run a function in a forked process. The caller has closed its connections before.

    A process that does not end within this time is killed.
    """
    if not hasattr(os, "fork"):
        raise UsageError("the crash kit needs fork and SIGKILL, so it works on POSIX systems only.")
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns of a fork beside other threads. The test runner's threads do nothing that the child needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(reading)
        _child(function, log)
    os.close(writing)
    in_time = False
    try:
        # The child's end of the pipe closes when the child ends.
        in_time = bool(select.select([reading], [], [], max(0.0, within_seconds))[0])
    finally:
        os.close(reading)
        _end(pid, within_seconds=1 if in_time else 0)
    _, status = os.waitpid(pid, 0)
    text = log.read_text(errors="replace") if log.exists() else ""
    return Ended(os.waitstatus_to_exitcode(status), in_time, text[-_TAIL_CHARACTERS:])


def _end(pid: int, *, within_seconds: float) -> None:
    """Kill the process if it does not end by itself in this time. The caller collects its status."""
    deadline = time.monotonic() + within_seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.001)


def _child(function: Callable[[], None], log: Path) -> None:
    status = 1
    try:
        # Signals of the test runner, such as the alarm of a time limit, have no handler here.
        for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Neither pytest nor the libraries of the parent may clean up here.
        os._exit(status)
