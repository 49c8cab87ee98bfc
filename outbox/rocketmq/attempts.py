"""The time limit of a handler, and the messages that stay invisible to other consumers meanwhile."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Attempt:
    """One call of the handler, with its time limit."""

    seconds: float
    ends_at: float = 0.0

    def begin(self) -> None:
        """Start the time limit again."""
        self.ends_at = time.monotonic() + self.seconds

    def is_over(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() >= self.ends_at

    def lost(self) -> str:
        """Why the attempt's effects no longer count, or ''."""
        return f"the handler ran longer than {self.seconds:g} s" if self.is_over() else ""


@dataclass(slots=True)
class Extended:
    """A message whose invisible time is extended until its attempt ends or it is released."""

    wire: Any
    attempt: Attempt
    released: bool = False
    extending: threading.Lock = field(default_factory=threading.Lock)
