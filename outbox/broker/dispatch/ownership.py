"""What the coordinator's thread and the dispatching thread tell each other about the queues this process owns.

The coordinator decides what to own and says so by events; the dispatching thread says when a queue may be let go.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from outbox.broker.dispatch.owned_queue import OwnedQueue
from outbox.broker.groups.leases import Lease, QueueKey
from outbox.broker.groups.suspects import QuarantinedMessage


@dataclass(frozen=True)
class QueueAcquired:
    """A queue to consume from its position on."""

    queue: OwnedQueue


@dataclass(frozen=True)
class QueueHandOver:
    """Finish what runs of this queue, store its offset, then call `Ownership.hand_back`."""

    lease: Lease


@dataclass(frozen=True)
class QueueLost:
    """The lease is over: start and record nothing of it any more."""

    lease: Lease


@dataclass(frozen=True)
class GroupChanged:
    """A group was paused or resumed, has another inbox generation, or other suspects."""

    group_id: int
    paused: bool
    generation: int
    suspects: Mapping[int, QuarantinedMessage]


@dataclass(frozen=True)
class QueueStopped:
    """A queue is stopped, or was resumed."""

    key: QueueKey
    stopped: bool


@dataclass(frozen=True)
class LifeChanged:
    """The coordinator has met another life of the broker: ask for the life before anything else is handled."""


Event = QueueAcquired | QueueHandOver | QueueLost | GroupChanged | QueueStopped | LifeChanged


class Ownership:
    """All state that both threads touch. No locks: each field is written whole or is a thread-safe container.

    `wake_dispatcher` is called after each event.
    """

    def __init__(self, wake_dispatcher: Callable[[], None]) -> None:
        self._wake_dispatcher = wake_dispatcher
        self._coordinator_wanted = threading.Event()
        self._events: deque[Event] = deque()
        self._handed_back: deque[Lease] = deque()
        self._lingering: set[QueueKey] = set()
        self._draining = False
        self._is_outdated = False

    # -- the dispatching thread's side ----------------------------------------------------------

    def next_event(self) -> Event | None:
        """The oldest event not yet taken."""
        return self._events.popleft() if self._events else None

    def hand_back(self, lease: Lease) -> None:
        """The queue is drained, or its lease was found to be over: let it go."""
        self._handed_back.append(lease)
        self._coordinator_wanted.set()

    def linger(self, key: QueueKey) -> None:
        """Handlers of a lost lease still run: taking the queue again now would let two calls run at once."""
        self._lingering.add(key)

    def linger_no_more(self, key: QueueKey) -> None:
        """The handlers of the lost lease have returned."""
        self._lingering.discard(key)

    def drain(self) -> None:
        """Take no more queues: what is handed back from now on is for others."""
        self._draining = True

    # -- the coordinator's side -----------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Tell the dispatching thread."""
        self._events.append(event)
        self._wake_dispatcher()

    def handed_back(self) -> list[Lease]:
        """Leases to be released, oldest first. They stay until they are `released`."""
        return list(self._handed_back)

    def released(self, count: int) -> None:
        """So many of the oldest `handed_back` were released."""
        for _ in range(count):
            self._handed_back.popleft()

    def hand_back_unused(self, leases: Iterable[Lease]) -> None:
        """Leases that were obtained but never became queues."""
        self._handed_back.extend(leases)

    def wait(self, seconds: float) -> None:
        """Until something is handed back or `wake_coordinator` is called, at most so long."""
        self._coordinator_wanted.wait(seconds)
        self._coordinator_wanted.clear()

    @property
    def is_draining(self) -> bool:
        """Whether no more queues may be taken."""
        return self._draining

    def outdate(self) -> None:
        """The ids of groups and topics name others now: take no more queues; the process has to register again."""
        self._is_outdated = self._draining = True
        self._wake_dispatcher()

    # -- any thread -----------------------------------------------------------------------------

    @property
    def is_outdated(self) -> bool:
        """Whether the process has to register again."""
        return self._is_outdated

    def lingers(self, key: QueueKey) -> bool:
        """Whether handlers of an earlier lease of this queue still run here."""
        return key in self._lingering

    def wake_coordinator(self) -> None:
        """Something may have changed: look now, not at the next turn."""
        self._coordinator_wanted.set()
