"""Recognise a process of this machine, and prove that it has ended.

    identity = process_identity()      # stored while the process runs
    has_ended(identity)                # asked by another process; True only if it is certain

A pid alone proves nothing, because the system gives it to other processes later. An identity also has the start time of
the process, the namespace of its pid, and the boot of its kernel. If the namespace of a container was given to another
one, the container has ended, and so have its processes.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE: Final = Path("/proc/self/ns/pid")
# A zombie has ended, although its parent has not read its exit code.
_ENDED_STATES: Final = "ZX"


def process_identity() -> str:
    """Return the identity of this process; '' if the system has no /proc, as outside of Linux."""
    return _identity(os.getpid())


# By pid, because a fork is another process. Each heartbeat sends it.
@cache
def _identity(pid: int) -> str:
    try:
        _, started = _state_and_start(pid)
        return f"{_where()} pid {pid} {started}"
    except (OSError, ValueError):
        return ""


def has_ended(identity: str) -> bool:
    """Return whether this process has certainly ended. False for processes of other machines and other containers."""
    where, _, process = identity.rpartition(" pid ")
    try:
        if not where or where != _where():
            return False
        pid, started = map(int, process.split())
        # Where /proc hides the processes of other users, a signal still finds them.
        os.kill(pid, 0)
        state, present = _state_and_start(pid)
        return present != started or state in _ENDED_STATES
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False


def _where() -> str:
    return f"{_BOOT.read_text().strip()} {_NAMESPACE.readlink()}"


def _state_and_start(pid: int) -> tuple[str, int]:
    """The name of the program, which is in parentheses, may have any characters."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])
