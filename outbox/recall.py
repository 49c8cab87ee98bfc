"""Recall: takes back a message that waits for its delivery time or for a retry."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from uuid import UUID


class RecallStatus(enum.StrEnum):
    """The outcome of a recall for one message."""

    RECALLED = "recalled"
    """This call recalled the message, which waited for its delivery time or for the retries of groups."""
    REPEATED = "recalled before"
    """An earlier call recalled the message."""
    DELIVERED = "delivered"
    """The recall is too late: the message is in its queue, and none of its retries is waiting."""
    WAITING = "waiting"
    """The message is decided, but is not in its queue yet, or waits for an earlier message of its key.

    Try the recall again soon.
    """
    UNDECIDED = "undecided"
    """The message's transaction still runs, or it is parked and waits for an operator's decision."""
    ROLLED_BACK = "rolled back"
    """The message's transaction rolled back, so no group gets the message."""
    UNKNOWN = "unknown"
    """The broker has no such message, or has deleted it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recall:
    """The outcome of a recall for one message.

    `groups` names the groups whose retry was recalled. If the message waited for its delivery time, `groups` is empty.
    """

    message_id: UUID
    status: RecallStatus
    topic: str = ""
    key: str = ""
    groups: tuple[str, ...] = ()

    @property
    def is_recalled(self) -> bool:
        """Whether the message is recalled, by this call or by an earlier call."""
        return self.status in (RecallStatus.RECALLED, RecallStatus.REPEATED)
