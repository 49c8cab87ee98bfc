"""Messages between the coordinator's thread and the dispatching thread about owned queues.

The coordinator decides which queues to own, and sends events. The dispatching thread says when a queue may be released.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from outbox.broker.dispatch.owned_queue import OwnedQueue
from outbox.broker.groups.leases import Lease, QueueKey
from outbox.broker.groups.quarantine import QuarantinedMessage


@dataclass(frozen=True)
class QueueAcquired:
    """A queue to consume from its position on."""

    queue: OwnedQueue


@dataclass(frozen=True)
class QueueHandOver:
    """Finish the running calls of this queue, store its offset, then call `Ownership.hand_back`."""

    lease: Lease


@dataclass(frozen=True)
class QueueLost:
    """The lease is over: start and record nothing of it any more."""

    lease: Lease


@dataclass(frozen=True)
class GroupChanged:
    """A group was paused or resumed, or has another inbox generation or other messages in quarantine."""

    group_id: int
    paused: bool
    generation: int
    quarantined: Mapping[int, QuarantinedMessage]


@dataclass(frozen=True)
class QueueStopped:
    """A queue is stopped, or was resumed."""

    key: QueueKey
    stopped: bool


@dataclass(frozen=True)
class LifeChanged:
    """The coordinator has seen another life of the broker: ask for the life before handling anything else."""


Event = QueueAcquired | QueueHandOver | QueueLost | GroupChanged | QueueStopped | LifeChanged


class Ownership:
    """All state that both threads use. No locks: each field is written whole or is a thread-safe container.

    `wake_dispatcher` is called after each event.
    """

    def __init__(self, wake_dispatcher: Callable[[], None]) -> None:
        self._wake_dispatcher = wake_dispatcher
        self._coordinator_wanted = threading.Event()
        self._events: deque[Event] = deque()
        self._handed_back: deque[Lease] = deque()
        self._blocked: set[QueueKey] = set()
        self._draining = False
        self._is_outdated = False

    # -- the dispatching thread's side ----------------------------------------------------------

    def next_event(self) -> Event | None:
        """Return the oldest event not yet taken."""
        return self._events.popleft() if self._events else None

    def hand_back(self, lease: Lease) -> None:
        """Give the queue back: it is drained, or its lease was found to be over."""
        self._handed_back.append(lease)
        self._coordinator_wanted.set()

    def block(self, key: QueueKey) -> None:
        """Block the queue:

        handlers of its lost lease still run, and a second owner thread here would run them twice at once.
        """
        self._blocked.add(key)

    def unblock(self, key: QueueKey) -> None:
        """Unblock the queue: the handlers of its lost lease have returned."""
        self._blocked.discard(key)

    def drain(self) -> None:
        """Acquire no more queues: queues handed back from now on are for other instances."""
        self._draining = True

    # -- the coordinator's side -----------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Send an event to the dispatching thread."""
        self._events.append(event)
        self._wake_dispatcher()

    def handed_back(self) -> list[Lease]:
        """Return the leases to be released, oldest first. They stay until they are `released`."""
        return list(self._handed_back)

    def released(self, count: int) -> None:
        """Remove this many of the oldest `handed_back` leases: they were released."""
        for _ in range(count):
            self._handed_back.popleft()

    def hand_back_unused(self, leases: Iterable[Lease]) -> None:
        """Give back acquired leases whose queues were never used."""
        self._handed_back.extend(leases)

    def wait(self, seconds: float) -> None:
        """Wait until a queue is handed back or `wake_coordinator` is called, at most `seconds`."""
        self._coordinator_wanted.wait(seconds)
        self._coordinator_wanted.clear()

    @property
    def is_draining(self) -> bool:
        """Whether no more queues may be acquired."""
        return self._draining

    def outdate(self) -> None:
        """Acquire no more queues, because ids of groups and topics are reused; the process has to register again."""
        self._is_outdated = self._draining = True
        self._wake_dispatcher()

    # -- any thread -----------------------------------------------------------------------------

    @property
    def is_outdated(self) -> bool:
        """Whether the process has to register again."""
        return self._is_outdated

    def is_blocked(self, key: QueueKey) -> bool:
        """Whether handlers of an earlier lease of this queue still run here."""
        return key in self._blocked

    def wake_coordinator(self) -> None:
        """Wake the coordinator now instead of at its next turn, because something may have changed."""
        self._coordinator_wanted.set()
