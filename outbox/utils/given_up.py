"""Tells one listener of this process about each dead letter. Without a listener, the process tells nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenUp:
    """A message that a group has given up after `attempts` attempts, with its last error."""

    group: str
    topic: str
    key: str
    message_id: UUID
    attempts: int
    error: str


Listener = Callable[[GivenUp], None]

# Consumers call the listener after the dead letter is stored, on the thread that stored it. So a listener must be quick
# and must not raise.
listener: Listener | None = None


def install(chosen: Listener | None) -> None:
    """Tell the dead letters of this process to `chosen` from now on. If `chosen` is None, tell them to no listener."""
    global listener
    listener = chosen
