"""The audit: an append-only file of JSON lines. Each line is on the disk before its action runs."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outbox.errors import UsageError


class RepairLog:
    """Writes lines: user, time, plan, and the caller's fields."""

    def __init__(self, descriptor: int, *, by: str, plan: str) -> None:
        self._descriptor = descriptor
        self._always = {"by": by, "plan": plan}

    def write(self, **entry: Any) -> None:
        """Append one line and wait until it is on the disk."""
        line = json.dumps({"at": datetime.now(UTC).isoformat(), **self._always, **entry}, default=str)
        os.write(self._descriptor, f"{line}\n".encode())
        os.fsync(self._descriptor)


@contextmanager
def opened(path: Path, *, by: str, plan: str) -> Iterator[RepairLog]:
    """The audit in `path`, created for this user only. It is locked against another apply meanwhile.

    Raises UsageError if it cannot be written, or if another process applies a plan with it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise UsageError(
            f"the audit {path} cannot be written: {error}. Nothing was done; correct the path or its permissions."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process applies a plan with the audit {path}. Nothing was done; wait until it ends."
            ) from None
        _end_torn_line(descriptor)
        yield RepairLog(descriptor, by=by, plan=plan)
    finally:
        os.close(descriptor)


def _end_torn_line(descriptor: int) -> None:
    """Start a new line after a crash: the machine may have left half a line."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
