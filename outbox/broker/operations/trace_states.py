"""The outcome of a queue entry for a group, derived from all data about its message."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from outbox.filters.filter import parse_filter


class EntryState(enum.StrEnum):
    """A group's state on a queue entry."""

    NO_GROUP = "no group"
    """No group has subscribed to the topic."""
    WAITING = "waiting"
    """The group has not finished it."""
    EXPIRED = "expired"
    """Retention removed it before the group had consumed it."""
    BEFORE_START = "before its start"
    """The group began after it."""
    FILTERED = "filtered"
    """The group's present filter excludes it."""
    SENT_BACK = "sent back"
    """It failed and was put into the group's retry queue."""
    DEAD = "dead"
    """It failed and became a dead letter."""
    HANDLED = "handled"
    """A handler has finished it."""
    PASSED = "handled or skipped"
    """The group skipped some entries of this queue; their offsets are not stored.

    Either the inbox knew the messages, or a reset passed over them.
    """


@dataclass(frozen=True, slots=True)
class EntryFacts:
    """An entry as one group sees it, oldest first among those of its message. Positions are the group's."""

    log_id: int
    topic: str
    queue_id: int
    queue: int
    offset: int
    attempt: int
    queued_at: str | None
    group: str | None
    is_retry: bool
    floor: int
    next_offset: int
    start_offset: int
    passed_over: int
    filter: str
    tag: str
    headers: str | None

    @property
    def place(self) -> tuple[int, str | None]:
        """The message and the group."""
        return self.log_id, self.group

    @property
    def is_filtered(self) -> bool:
        """Whether the group's filter excludes it. Retries are not filtered again."""
        headers = json.loads(self.headers) if self.headers else {}
        return not self.is_retry and not parse_filter(self.filter).evaluate(self.tag, headers)


def state_of(
    entry: EntryFacts,
    later: Sequence[EntryFacts],
    retrying: Collection[tuple[int, str | None]],
    dead: Collection[tuple[int, str | None]],
) -> EntryState:
    """Return the state of an entry. `later`: further entries of its message for the group.

    A replayed dead letter starts again. `retrying` and `dead` hold (log id, group) of messages that wait for another
    attempt, and of dead letters not replayed.
    """
    if entry.group is None:
        return EntryState.NO_GROUP
    # A group finishes messages ahead of its stored offset, so data about this entry comes first.
    if not later and entry.place in dead:
        return EntryState.DEAD
    if not later and entry.place in retrying:
        return EntryState.SENT_BACK
    if entry.offset >= entry.next_offset:
        return EntryState.EXPIRED if entry.offset < entry.floor else EntryState.WAITING
    if entry.offset < entry.start_offset:
        return EntryState.BEFORE_START
    if later:
        return EntryState.DEAD if later[0].attempt == 0 else EntryState.SENT_BACK
    if entry.is_filtered:
        return EntryState.FILTERED
    return EntryState.PASSED if entry.passed_over else EntryState.HANDLED
