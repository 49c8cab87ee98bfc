"""How long a handler may take, and the messages that are kept from others meanwhile."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Attempt:
    """One call of the handler, and how long it may take."""

    seconds: float
    ends_at: float = 0.0

    def begin(self) -> None:
        """Give it the full time from now on."""
        self.ends_at = time.monotonic() + self.seconds

    def is_over(self) -> bool:
        """Whether its time is up."""
        return time.monotonic() >= self.ends_at

    def lost(self) -> str:
        """Why its effects do not count any more, or ''."""
        return f"the handler ran longer than {self.seconds:g} s" if self.is_over() else ""


@dataclass(slots=True)
class Extended:
    """A message whose invisible time is extended while its attempt lasts, or until it is released."""

    wire: Any
    attempt: Attempt
    released: bool = False
    extending: threading.Lock = field(default_factory=threading.Lock)
