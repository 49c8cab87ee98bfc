"""A sign of life in a file: what a process's own loop writes, and what a probe reads without asking anybody.

A thread beside the loop would go on while the loop hangs, so the loop itself beats. The file's time says when it last
did, its text whether it could work. Off, and free, unless the environment names a file.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

VARIABLE: Final = "OUTBOX_HEARTBEAT"
_EVERY_SECONDS: Final = 1.0
_READY: Final = "ready"
_WAITING: Final = "waiting"

_last: tuple[float, bool] = (0.0, False)


def beat(*, ready: bool) -> None:
    """Say that the loop goes round, at most once a second. `ready`: the broker answers and there is work it can do.

    Never raises: a full disk must not stop messages.
    """
    global _last
    path = os.environ.get(VARIABLE)
    if not path:
        return
    now = time.monotonic()
    at, was_ready = _last
    if was_ready == ready and now - at < _EVERY_SECONDS:
        return
    _last = (now, ready)
    with contextlib.suppress(OSError):
        whole = Path(f"{path}.new")
        whole.write_text(_READY if ready else _WAITING)
        whole.replace(path)


def busy(seconds: float) -> None:
    """Say that the loop does something long now, and beats again within `seconds`: it must not be taken for hung."""
    global _last
    path = os.environ.get(VARIABLE)
    if not path:
        return
    _last = (0.0, False)
    with contextlib.suppress(OSError):
        Path(path).touch()
        os.utime(path, (time.time() + seconds, time.time() + seconds))


@dataclass(frozen=True, slots=True)
class SignOfLife:
    """What a file says. `age_seconds` is None where there is none yet."""

    name: str
    age_seconds: float | None
    is_ready: bool

    def is_alive(self, *, within_seconds: float) -> bool:
        """Whether the loop went round lately."""
        return self.age_seconds is not None and self.age_seconds <= within_seconds


def listen(path: Path) -> SignOfLife:
    """Read one file."""
    try:
        text, written_at = path.read_text(), path.stat().st_mtime
    except OSError:
        return SignOfLife(path.name, None, False)
    return SignOfLife(path.name, max(0.0, time.time() - written_at), text == _READY)
