"""A heartbeat file, which the main loop of a process writes and a probe reads. A thread would write while it hangs.

Its modification time is the time of the last heartbeat; its text (`ready` or `waiting`) says whether the loop could do
its work. Without the environment variable OUTBOX_HEARTBEAT, the process writes none.

A loop may have a connection of its own, past a pooler. So another thread of its process says with `reached` whether the
ordinary connection works.
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
_is_reached = True


def reached(is_reached: bool) -> None:
    """Note whether a request on the ordinary connection has reached the broker. If not, no heartbeat says `ready`."""
    global _is_reached
    _is_reached = is_reached


def beat(*, ready: bool) -> None:
    """Write a heartbeat, at most once a second. It never raises: a full disk must not stop the handling of messages."""
    global _last
    path = os.environ.get(VARIABLE)
    if not path:
        return
    ready = ready and _is_reached
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
    """Announce a step that lasts up to `seconds`. For this time the loop counts as alive without a new heartbeat."""
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
    """The content of a heartbeat file. If the file does not exist, `age_seconds` is None."""

    name: str
    age_seconds: float | None
    is_ready: bool

    def is_alive(self, *, within_seconds: float) -> bool:
        """Whether the last heartbeat is recent enough."""
        return self.age_seconds is not None and self.age_seconds <= within_seconds


def listen(path: Path) -> SignOfLife:
    """Read one heartbeat file."""
    try:
        text, written_at = path.read_text(), path.stat().st_mtime
    except OSError:
        return SignOfLife(path.name, None, False)
    return SignOfLife(path.name, max(0.0, time.time() - written_at), text == _READY)
