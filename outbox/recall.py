"""Recalling: taking back a message that waits for its delivery time or for a retry."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from uuid import UUID


class RecallStatus(enum.StrEnum):
    """The outcome of a recall for one message."""

    RECALLED = "recalled"
    """Recalled now: it waited for its delivery time, or for the retries of groups."""
    REPEATED = "recalled before"
    """Recalled by an earlier call."""
    DELIVERED = "delivered"
    """Too late: it is in its queue, and none of its retries is waiting."""
    WAITING = "waiting"
    """Decided, but not placed yet, or held behind another message of its key: try again in a moment."""
    UNDECIDED = "undecided"
    """Its transaction is undecided. A running one can still roll back; an operator can decide a parked one."""
    ROLLED_BACK = "rolled back"
    """Its transaction rolled back, so no group gets it."""
    UNKNOWN = "unknown"
    """The broker has no such message, or has deleted it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recall:
    """The outcome for one message.

    `groups` are those whose retry was recalled. It is empty if the message waited for its delivery time.
    """

    message_id: UUID
    status: RecallStatus
    topic: str = ""
    key: str = ""
    groups: tuple[str, ...] = ()

    @property
    def is_recalled(self) -> bool:
        """Whether it is recalled, by this call or an earlier one."""
        return self.status in (RecallStatus.RECALLED, RecallStatus.REPEATED)
