"""Keeps this process in its groups: heartbeats, leases, and its share of the queues.

It runs in a thread with a connection of its own, so that neither a long handler nor a long fetch lets a lease run
out. It decides what to hold; the dispatching thread learns of it by events and says when a queue may be let go.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

import psycopg

from outbox.broker.consumer import broadcast
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase, Connection
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Channel, notify
from outbox.broker.dispatch.fetch import floors
from outbox.broker.dispatch.owned_queue import HeldQueue, Phase
from outbox.broker.dispatch.station import ConsumingGroup, Station
from outbox.broker.groups import leases, members, offsets, rebalance
from outbox.broker.groups.leases import Lease, QueueKey, lease_clock
from outbox.broker.groups.members import QueueState
from outbox.errors import BrokerUnavailable

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Gained:
    """A queue to consume from its position on."""

    queue: HeldQueue


@dataclass(frozen=True)
class HandOver:
    """Finish what runs of this queue, store its offset, then call `hand_back`."""

    lease: Lease


@dataclass(frozen=True)
class Lost:
    """The lease is over: start and record nothing of it any more."""

    lease: Lease


@dataclass(frozen=True)
class Switched:
    """A group was paused or resumed, or has another generation."""

    group_id: int
    paused: bool
    generation: int


@dataclass(frozen=True)
class Stopped:
    """A queue is stopped, or was resumed."""

    key: QueueKey
    stopped: bool


Event = Gained | HandOver | Lost | Switched | Stopped


@dataclass
class _Shared:
    """What both threads touch; each field is written whole or is a thread-safe container."""

    events: deque[Event] = field(default_factory=deque)
    handed_back: deque[Lease] = field(default_factory=deque)
    # Keys of lost queues whose handlers still run here: taking those again would let two run at once.
    lingering: set[QueueKey] = field(default_factory=set)


class Keeper:
    """See the module's text. `bell` wakes the dispatching thread."""

    def __init__(
        self,
        database: BrokerDatabase,
        instance: UUID,
        groups: Sequence[ConsumingGroup],
        *,
        lease_seconds: float,
        strategy: rebalance.Strategy | Collection[int],
        bell: Callable[[], None],
    ) -> None:
        self._database = database
        self._schema = database.schema
        self._instance = instance
        self._groups = {group.group_id: group for group in groups}
        self._shared_groups = [group.group_id for group in groups if not group.broadcast]
        self._term = lease_seconds
        self._strategy = strategy
        self._bell = bell
        self._held: dict[QueueKey, Lease] = {}
        self._leaving: set[QueueKey] = set()
        self._switches: dict[int, Switched] = {}
        self._queues: dict[QueueKey, HeldQueue] = {}
        self._renew_at = 0.0
        self._broadcast = broadcast.Follower([group for group in groups if group.broadcast])
        self._shared = _Shared()
        self._connection: BrokerConnection | None = None
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()
        self._stopping = threading.Event()
        self._draining = False

    # -- the dispatching thread's side ----------------------------------------------------------

    @property
    def events(self) -> deque[Event]:
        """What happened, oldest first; the dispatching thread takes them from the left."""
        return self._shared.events

    @property
    def lingering(self) -> set[QueueKey]:
        """Keys not to be acquired: handlers of an earlier lease still run here. The dispatching thread writes it."""
        return self._shared.lingering

    def hand_back(self, lease: Lease) -> None:
        """The queue is drained, or its lease was found to be over: let it go."""
        self._shared.handed_back.append(lease)
        self._wanted.set()

    def look(self) -> None:
        """Something may have changed: look now, not at the next turn."""
        self._wanted.set()

    def start(self) -> None:
        """Run in a thread until `stop`."""
        self._thread = threading.Thread(target=self._run, name="outbox-keeper", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Take no more queues: what is handed back from now on is for others."""
        self._draining = True

    def stop(self) -> None:
        """Release what is held and leave the groups."""
        self._stopping.set()
        self._wanted.set()
        if self._thread is not None:
            # A turn takes no longer than its deadline.
            self._thread.join()
        with contextlib.suppress(psycopg.Error, BrokerUnavailable):
            self._leave()
        self._disconnect()

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.run_once()
            except (psycopg.Error, BrokerUnavailable) as error:
                logger.warning("leases cannot be renewed now, trying again: %s", error)
                self._disconnect()
                self._drop_untrusted()
            except Exception:
                # A keeper that died would leave its process without queues, and nobody would notice.
                logger.exception("keeping the leases failed, trying again")
                self._disconnect()
                self._drop_untrusted()
            self._wanted.wait(min(_LOOK_SECONDS, self._term / 3))
            self._wanted.clear()

    def run_once(self) -> None:
        """One turn: heartbeat and renewal if due, give back, and take what is this process's share.

        Raises BrokerUnavailable when the database does not answer within a term, be it for somebody's lock: a keeper
        that waited in silence would lose its leases without a word.
        """
        with self._connected().within(time.monotonic() + self._term) as connection:
            self._turn(connection)

    def _turn(self, connection: Connection) -> None:
        if lease_clock() >= self._renew_at:
            self._renew(connection)
        self._give_back(connection)
        self._drop_untrusted()
        self._read_switches(connection)
        self._rebalance(connection)
        for queue in self._broadcast.gained(connection, self._schema):
            self._emit(Gained(queue))

    def _connected(self) -> BrokerConnection:
        if self._connection is None or self._connection.closed:
            self._connection = self._database.open(name="outbox-keeper", timeout_seconds=self._term)
            self._renew_at = 0.0
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _emit(self, event: Event) -> None:
        self._shared.events.append(event)
        self._bell()

    def _renew(self, connection: Connection) -> None:
        started = lease_clock()
        first = self._renew_at == 0.0
        topics = {
            group_id: [station.subscription.topic for station in group.stations.values()]
            for group_id, group in self._groups.items()
        }
        members.heartbeat(connection, self._schema, self._instance, topics, term_seconds=self._term)
        if self._held:
            kept = leases.renew(
                connection, self._schema, self._instance, list(self._held.values()), term_seconds=self._term
            )
            for lease in [lease for key, lease in self._held.items() if key not in kept]:
                self._lose(lease)
        self._renew_at = started + self._term / 3
        if first:
            members.forget_the_dead(connection, self._schema)
            notify(Executor(connection, self._schema), Channel.SHARED)

    def _give_back(self, connection: Connection) -> None:
        returned = list(self._shared.handed_back)
        if not returned:
            return
        leases.release(connection, self._schema, self._instance, returned)
        # Not before: what an error left unreleased would have no owner until its term is over.
        for lease in returned:
            self._shared.handed_back.popleft()
            self._forget(lease)
        notify(Executor(connection, self._schema), Channel.SHARED)

    def _drop_untrusted(self) -> None:
        for lease in [lease for lease in self._held.values() if not lease.trusted()]:
            self._lose(lease)

    def _lose(self, lease: Lease) -> None:
        self._forget(lease)
        self._emit(Lost(lease))

    def _forget(self, lease: Lease) -> None:
        if self._held.get(lease.key) is lease:
            del self._held[lease.key]
            self._leaving.discard(lease.key)
            self._queues.pop(lease.key, None)

    def _read_switches(self, connection: Connection) -> None:
        for group_id, state in members.groups(connection, self._schema, list(self._groups)).items():
            switched = Switched(group_id, state.paused, state.generation)
            if self._switches.get(group_id) != switched:
                self._switches[group_id] = switched
                self._emit(switched)

    def _rebalance(self, connection: Connection) -> None:
        if not self._shared_groups or self._draining:
            return
        alive = members.members(connection, self._schema, self._shared_groups)
        # Before the database is asked: a queue that was stopped here by then is stopped there.
        stopped = {key for key, queue in self._queues.items() if queue.phase is Phase.STOPPED}
        queues = members.queues(connection, self._schema, self._shared_groups)
        self._compare(queues, stopped)
        for group_id in self._shared_groups:
            of_group = [queue for queue in queues if queue.key[0] == group_id]
            mine = rebalance.share(self._instance, self._strategy, alive[group_id], of_group)
            for key in [key for key in self._held if key[0] == group_id and key not in mine]:
                self._let_go(key)
            free = [
                queue
                for queue in of_group
                if queue.key in mine
                and queue.key not in self._held
                and queue.key not in self._shared.lingering
                and (queue.owner is None or queue.expired)
            ]
            if free:
                self._acquire(connection, self._groups[group_id], free)

    def _compare(self, queues: Sequence[QueueState], stopped: Collection[QueueKey]) -> None:
        """Notice leases that were fenced (an offset reset) and queues that an operator resumed."""
        for queue in queues:
            lease = self._held.get(queue.key)
            if lease is None:
                continue
            if queue.epoch != lease.epoch or queue.owner != self._instance:
                self._lose(lease)
            elif (queue.stopped is not None) != (queue.key in stopped):
                self._emit(Stopped(queue.key, queue.stopped is not None))

    def _let_go(self, key: QueueKey) -> None:
        if key not in self._leaving:
            self._leaving.add(key)
            self._emit(HandOver(self._held[key]))

    def _acquire(self, connection: Connection, group: ConsumingGroup, free: Sequence[QueueState]) -> None:
        queue_ids = sorted(queue.key[1] for queue in free)
        obtained = leases.acquire(
            connection, self._schema, self._instance, group.group_id, queue_ids, term_seconds=self._term
        )
        if not obtained:
            return
        try:
            self._take_up(connection, group, obtained, {queue.key: queue for queue in free})
        except BaseException:
            # Held by us in the database only: nobody would consume them until their term is over.
            self._shared.handed_back.extend(lease for lease in obtained if lease.key not in self._held)
            raise

    def _take_up(
        self,
        connection: Connection,
        group: ConsumingGroup,
        obtained: Sequence[Lease],
        states: Mapping[QueueKey, QueueState],
    ) -> None:
        # A reset may have raised the generation since it was read; what is gained now belongs to the new one.
        self._read_switches(connection)
        held = [lease.key[1] for lease in obtained]
        positions = offsets.load(connection, self._schema, group.group_id, held)
        lowest = floors(connection, self._schema, held)
        for lease in obtained:
            state = states[lease.key]
            queue = HeldQueue(lease, group, station_of(group, state), queue_name(group, state), positions[lease.key[1]])
            queue.skip_to(lowest[lease.key[1]])
            if state.stopped is not None:
                queue.phase = Phase.STOPPED
            self._held[lease.key] = lease
            self._queues[lease.key] = queue
            self._emit(Gained(queue))

    def _leave(self) -> None:
        """Release everything; what was not handed back is drained or lost by now."""
        while self._shared.handed_back:
            lease = self._shared.handed_back.popleft()
            self._held.setdefault(lease.key, lease)
        with self._connected().within(time.monotonic() + self._term) as connection:
            if self._held:
                leases.release(connection, self._schema, self._instance, list(self._held.values()))
                self._held.clear()
            members.leave(connection, self._schema, self._instance)
            notify(Executor(connection, self._schema), Channel.SHARED)


def station_of(group: ConsumingGroup, state: QueueState) -> Station | None:
    """The station of a queue's topic; None for the retry queue."""
    by_topic = {station.subscription.topic: station for station in group.stations.values()}
    return by_topic[state.topic] if state.topic is not None else None


def queue_name(group: ConsumingGroup, state: QueueState) -> str:
    """What deliveries call the queue."""
    return f"%RETRY%{group.name}" if state.topic is None else f"{state.topic}/{state.number}"
