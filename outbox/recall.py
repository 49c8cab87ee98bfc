"""Recalling: taking back a message that waits for its time, before it is delivered or delivered again."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from uuid import UUID


class RecallStatus(enum.StrEnum):
    """What became of a message that was to be recalled."""

    RECALLED = "recalled"
    """Taken back now: it waited for its delivery time, or for the retries of groups."""
    REPEATED = "recalled before"
    """Taken back by an earlier call."""
    DELIVERED = "delivered"
    """Too late: it is in its queue, and no retry of it waits."""
    WAITING = "waiting"
    """Decided, but not placed yet or held behind another of its key: try again in a moment."""
    UNDECIDED = "undecided"
    """Its transaction is not decided: while it runs, it can still roll back; a parked one an operator can decide."""
    ROLLED_BACK = "rolled back"
    """Nobody gets it anyway."""
    UNKNOWN = "unknown"
    """The broker has no such message (any more)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recall:
    """The outcome for one message. `groups`: those whose retry was taken back; none where it waited for its time."""

    message_id: UUID
    status: RecallStatus
    topic: str = ""
    key: str = ""
    groups: tuple[str, ...] = ()

    @property
    def is_recalled(self) -> bool:
        """Whether it was taken back, now or before."""
        return self.status in (RecallStatus.RECALLED, RecallStatus.REPEATED)
