"""The audit: an append-only file of JSON lines, each on the disk before what it announces is done."""

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
    """Writes lines: who, when, which plan, and what the caller says."""

    def __init__(self, descriptor: int, *, by: str, plan: str) -> None:
        self._descriptor = descriptor
        self._always = {"by": by, "plan": plan}

    def write(self, **entry: Any) -> None:
        """Append one line and wait for the disk."""
        line = json.dumps({"at": datetime.now(UTC).isoformat(), **self._always, **entry}, default=str)
        os.write(self._descriptor, f"{line}\n".encode())
        os.fsync(self._descriptor)


@contextmanager
def opened(path: Path, *, by: str, plan: str) -> Iterator[RepairLog]:
    """The audit in `path`, made for this user alone if it is not there; nobody else applies with it meanwhile.

    Raises UsageError when it cannot be written, or when another process applies a plan with it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise UsageError(f"the audit {path} cannot be written: {error}. Nothing was done.") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process applies a plan with the audit {path}. Nothing was done.") from None
        _end_torn_line(descriptor)
        yield RepairLog(descriptor, by=by, plan=plan)
    finally:
        os.close(descriptor)


def _end_torn_line(descriptor: int) -> None:
    """A crash of the machine may have left half a line; the next one must not continue it."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
