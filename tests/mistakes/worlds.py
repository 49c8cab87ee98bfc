"""The databases of business rows and broker, which determine the path of a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class World:
    """`alias` holds the business rows, `broker` the broker's tables."""

    name: str
    alias: str
    broker: str

    def __str__(self) -> str:
        return self.name


TWO_PHASE: Final = World("two_phase", "default", "broker")
ATOMIC: Final = World("atomic", "default", "default")
SQLITE: Final = World("sqlite", "lite", "broker")
WORLDS: Final = (TWO_PHASE, ATOMIC, SQLITE)
