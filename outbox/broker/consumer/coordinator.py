"""The coordinator keeps this process in its groups: it renews leases and acquires a share of the queues.

The coordinator runs in its own thread with its own connection. So no lease expires during a long handler call or a long
fetch. The coordinator decides which queues this process owns, and sends events about them to the dispatching thread.
The coordinator releases a queue after the dispatching thread has handed the queue back.

In a bounded pass, the dispatching thread runs the first round and leaves the groups on its own connection. The
coordinator connects only if the pass still runs when the next round is due, because a session costs more than most of
these passes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final
from uuid import UUID

import psycopg

from outbox.broker.consumer.owned_queue import (
    Change,
    ConsumingGroup,
    OwnedQueue,
    Ownership,
    Phase,
)
from outbox.broker.database import arrays, timeouts
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Channel, notify
from outbox.broker.database.statement import Statement
from outbox.broker.groups import leases, lives, members, offsets, quarantine, rebalance, send_back
from outbox.broker.groups.leases import Lease, QueueKey, lease_clock
from outbox.broker.groups.members import CallsReport, GroupSnapshot, GroupState, QueueState
from outbox.broker.groups.offsets import Position
from outbox.broker.log.consume_queue import floors, starting_offsets
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.errors import BrokerUnavailable
from outbox.utils.safe_text import printable

logger = logging.getLogger(__name__)


# -- broadcast groups ------------------------------------------------------------------------------
#
# In a broadcast group, every instance handles every message.
#
# The instances do not divide the queues of a broadcast group, so the queues have no leases. Each instance keeps its
# positions in memory. **Each time** an instance starts, it begins at the `start` of its subscription. With FIRST, the
# instance reads all retained messages again, for example to build a cache. With LAST, the instance reads only messages
# that arrive while it runs. If a message fails, the instance itself tries it again, after the delays of the retry
# policy. After the last attempt the instance logs an error and gives the message up. A broadcast group has no retry
# queue and no dead letters, because a message in them would reach only one instance.


_QUEUES = Statement("""
SELECT topic_id, queue_id, number, layout, closed_at
FROM {schema}.queue WHERE topic_id = ANY(%(topic_ids)s::integer[])
ORDER BY topic_id, layout, number
""")


class BroadcastQueues:
    """Finds the queues of broadcast groups, including queues that are added later.

    An instance consumes the queues of a newer layout after it has consumed all queues of the older layout.
    """

    def __init__(self, groups: Sequence[ConsumingGroup]) -> None:
        self._groups = groups
        self._owned: dict[tuple[int, int], OwnedQueue] = {}
        # The groups and topics whose queues have begun, and by group and queue the offset at which a queue begins, or
        # at which a given-back queue continues when it is gained again.
        self._begun: set[tuple[int, int]] = set()
        self._starts: dict[QueueKey, int] = {}

    def rewind(self, lives: Sequence[Mapping[int, int]]) -> list[OwnedQueue]:
        """Return all queues. This process gives the queues up, because the server has begun new lives.

        `lives` has one mapping for each new life: the head of each queue when that life began. In the new life, the
        offsets at or above the head of a queue belong to other messages than before. When `gained` returns a queue
        again, this process continues at its former offset, or at the queue's smallest head in `lives` if this head is
        lower.
        """
        lost = list(self._owned.values())
        for queue in lost:
            self.returned(queue.lease)
        for key, at in self._starts.items():
            self._starts[key] = min([at, *(heads.get(key[1], 0) for heads in lives)])
        return lost

    def returned(self, lease: Lease) -> None:
        """Record that this process no longer consumes a queue.

        If `gained` later returns the queue again, this process continues at the position that the queue has now.
        """
        queue = self._owned.get(lease.key)
        if queue is not None and queue.lease is lease:
            del self._owned[lease.key]
            self._starts[lease.key] = queue.window.base

    def gained(self, run: Executor, life: UUID, blocked: Collection[QueueKey]) -> list[OwnedQueue]:
        """Return the new queues to consume.

        A queue in `blocked` is left out: handlers of an earlier lease of it still run.
        """
        topic_ids = {topic_id for group in self._groups for topic_id in group.subscribed}
        if not topic_ids:
            return []
        found: list[OwnedQueue] = []
        rows = run.rows(_QUEUES, {"topic_ids": arrays.integers(sorted(topic_ids))})
        for group in self._groups:
            for topic_id, subscribed in group.subscribed.items():
                place = (group.group_id, topic_id)
                if place not in self._begun:
                    starts = starting_offsets(run, topic_id, subscribed.subscription.start)
                    self._starts |= {(group.group_id, queue_id): at for queue_id, at in starts.items()}
                    self._begun.add(place)
                of_topic = [row[1:] for row in rows if row[0] == topic_id]
                found += self._next_layout(group, topic_id, of_topic, life, blocked)
        return found

    def _next_layout(
        self,
        group: ConsumingGroup,
        topic_id: int,
        rows: Sequence[tuple[int, int, int, int | None]],
        life: UUID,
        blocked: Collection[QueueKey],
    ) -> list[OwnedQueue]:
        subscribed = group.subscribed[topic_id]
        found: list[OwnedQueue] = []
        turn: int | None = None
        for queue_id, number, layout, closed_at in rows:
            key = (group.group_id, queue_id)
            owned = self._owned.get(key)
            start = self._starts.get(key, 0)
            at = owned.window.base if owned is not None else start
            if closed_at is not None and at >= closed_at:
                continue
            turn = layout if turn is None else turn
            if owned is None and layout == turn and key not in blocked:
                lease = Lease(key, 0, math.inf, life)
                name = f"{subscribed.subscription.topic}/{number}"
                queue = OwnedQueue(lease, group, subscribed, name, Position(start, start))
                self._owned[queue.key] = queue
                found.append(queue)
        return found


# -- the coordinator -------------------------------------------------------------------------------


_LOOK_SECONDS: Final = 1.0


class Coordinator:
    """Sends heartbeats, renews leases, and acquires this process's share of the queues.

    The parameter `ownership` connects the coordinator to the dispatching thread. `report` returns the running handler
    calls, which the heartbeat stores for operators, and it says whether the process drains. The coordinator's own
    thread runs all methods except `start` and `stop`. Before `start`, another thread may call `run_once`.
    """

    def __init__(
        self,
        database: BrokerDatabase,
        instance: UUID,
        groups: Sequence[ConsumingGroup],
        ownership: Ownership,
        *,
        lease_seconds: float,
        report: Callable[[], CallsReport] = CallsReport,
    ) -> None:
        self._database = database
        self._instance = instance
        self._report = report
        self._groups = {group.group_id: group for group in groups}
        self._shared_groups = [group.group_id for group in groups if not group.broadcast]
        self._ownership = ownership
        self._term = lease_seconds
        self._note = FailureNote(database, ProcessPart.LEASES, of=", ".join(sorted(group.name for group in groups)))
        # The queues whose leases this process holds, and those of them that it hands over.
        self._queues: dict[QueueKey, OwnedQueue] = {}
        self._leaving: set[QueueKey] = set()
        self._renew_at = 0.0
        self._heard_at = lease_clock()
        self._broadcast = BroadcastQueues([group for group in groups if group.broadcast])
        self._connection: BrokerConnection | None = None
        # `_is_new`: whether the connection is new. `_is_lifted`: whether the timeouts of the database role are lifted
        # for the connection. Behind a pooler, these timeouts are not lifted.
        self._is_new = True
        self._is_lifted = False
        self._life: UUID | None = None
        self._asks_life = True
        # Leases of an earlier life that the dispatching thread has not handed back. Until the dispatching thread hands
        # a lease back, handlers of this lease may still run.
        self._awaited: dict[QueueKey, Lease] = {}
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._pause_seconds = min(_LOOK_SECONDS, lease_seconds / 3)

    def start(self, *, after_a_round: bool = False) -> None:
        """Run the coordinator in a new thread until `stop` is called.

        `after_a_round`: the caller has run the first round, so the thread begins with the pause after it.
        """
        self._thread = threading.Thread(target=self._run, args=[after_a_round], name="outbox-coordinator", daemon=True)
        self._thread.start()

    def stop(self, lent: BrokerConnection | None = None) -> None:
        """Release all queues and leave the groups, on the coordinator's connection; if there is none, on `lent`."""
        self._stopping.set()
        self._ownership.wake_coordinator()
        if self._thread is not None:
            # Each round of the coordinator ends at its deadline at the latest, so the thread ends soon.
            self._thread.join()
        with contextlib.suppress(psycopg.Error, BrokerUnavailable):
            self._leave(lent)
        self._disconnect()
        self._note.worked()

    # -- the thread -----------------------------------------------------------------------------

    def _run(self, after_a_round: bool) -> None:
        if after_a_round:
            # A queue that is handed back does not end this pause, or each pass would connect before it leaves.
            self._stopping.wait(self._pause_seconds)
        while not self._stopping.is_set():
            try:
                self.run_once()
                self._note.worked()
            except (psycopg.Error, BrokerUnavailable) as error:
                self._note.failed(error)
                logger.warning("leases cannot be renewed now, trying again: %s", error)
                self._disconnect()
                self._drop_untrusted()
            except Exception as error:
                self._note.failed(error)
                # If the coordinator's thread died, its process would lose all queues without a line in the log.
                logger.error("the coordinator failed to keep the leases, trying again", exc_info=printable(error))
                self._disconnect()
                self._drop_untrusted()
            self._ownership.wait(self._pause_seconds)

    def run_once(self, lent: BrokerConnection | None = None) -> None:
        """Run one round: renew membership and leases if due, release queues, and acquire this process's share.

        It uses the connection `lent`, or else its own. Raises BrokerUnavailable if the database does not answer within
        a lease term, even if a statement only waits for a lock. Without a limit of one lease term, the leases could
        expire while the coordinator waits for the database.
        """
        with (lent or self._connected()).within(time.monotonic() + self._term) as connection:
            self._turn(Executor(connection, self._database.schema))

    def _turn(self, run: Executor) -> None:
        # The timeouts of a connection that is lent are those of its owner.
        if self._is_new and run.connection is self._connection:
            self._is_lifted = timeouts.lift_where_direct(run.connection)
            self._is_new = False
        life = self._current_life(run)
        if self._ownership.is_outdated:
            return
        if lease_clock() >= self._renew_at:
            self._renew(run)
        self._give_back(run)
        self._drop_untrusted()
        # Make the set of stopped queues before `members.look` reads the database. Each queue of this set is then also
        # stopped in the rows that `members.look` returns.
        stopped = {key for key, queue in self._queues.items() if queue.phase is Phase.STOPPED}
        look = members.look(run, list(self._groups))
        if look.life != life:
            # The database was restored while this connection stayed open. The next round reads the new life first.
            self._asks_life = True
            self._ownership.wake_coordinator()
            return
        shares = bool(self._shared_groups) and not self._ownership.is_draining
        if shares:
            # Before the new generation is set: a queue that a reset has fenced is lost first.
            self._compare(look.queues, stopped)
        self._follow(run, look.groups)
        if shares:
            self._rebalance(run, life, look)
        for queue in self._broadcast.gained(run, life, self._ownership.blocked):
            self._ownership.emit(Change.ACQUIRED, queue)

    def _current_life(self, run: Executor) -> UUID:
        """Return the present life.

        If the life has changed, give up all queues, because their offsets may now belong to other messages.

        The coordinator reads the life on each new connection, and again when `members.look` returns another life. A
        connection may stay open during a restore. A connection to a pooler may also stay open when the server restarts.
        """
        if self._life is not None and not self._asks_life:
            return self._life
        life = lives.current(run)
        self._asks_life = False
        if self._life is not None and life != self._life:
            logger.warning("the broker was restored or restarted: consuming continues from the present positions")
            self._check_names(run)
            # After a restore, the rows of members and leases come from the backup. So renew memberships and leases now.
            self._renew_at = 0.0
            for queue in list(self._queues.values()):
                self._awaited[queue.key] = queue.lease
                self._lose(queue)
            for queue in self._broadcast.rewind(lives.heads_since(run, self._life)):
                self._ownership.emit(Change.LOST, queue)
            self._ownership.emit(Change.NEW_LIFE, None)
        self._life = life
        return life

    def _check_names(self, run: Executor) -> None:
        """Check that each id of a group or topic still belongs to the same name.

        After a restore to a time before the registration, the ids may be unused or may belong to other groups and
        topics.
        """
        groups = {group.group_id: group.name for group in self._groups.values()}
        topics = {
            topic_id: subscribed.subscription.topic
            for group in self._groups.values()
            for topic_id, subscribed in group.subscribed.items()
        }
        if members.names(run, list(groups), list(topics)) != (groups, topics):
            logger.warning("the broker no longer knows the groups or topics of this process: registering again")
            self._ownership.outdate()

    def _connected(self) -> BrokerConnection:
        if self._connection is None or self._connection.closed:
            self._connection = self._database.open(name="outbox-coordinator", timeout_seconds=self._term, direct=True)
            self._renew_at = 0.0
            self._is_new = True
            self._asks_life = True
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _renew(self, run: Executor) -> None:
        started = lease_clock()
        first = self._renew_at == 0.0
        topics = {
            group_id: [subscribed.subscription.topic for subscribed in group.subscribed.values()]
            for group_id, group in self._groups.items()
        }
        with self._without_timeouts(run):
            members.heartbeat(
                run,
                self._instance,
                topics,
                term_seconds=self._term,
                report=self._report(),
                draining=self._ownership.is_draining,
            )
        if self._queues:
            held = [queue.lease for queue in self._queues.values()]
            with self._without_timeouts(run):
                kept = leases.renew(run, self._instance, held, term_seconds=self._term)
            for queue in [queue for key, queue in self._queues.items() if key not in kept]:
                self._lose(queue)
        if started - self._heard_at > self._term:
            quarantine.withdraw_vanished(run, self._instance)
        self._heard_at = started
        self._renew_at = started + self._term / 3
        if first:
            members.forget_the_dead(run)
            quarantine.forget_the_old(run)
            notify(run, Channel.SHARED)

    def _without_timeouts(self, run: Executor) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the timeouts of the database role do not cancel a statement.

        A cancelled renewal could lose the leases.
        """
        return contextlib.nullcontext() if self._is_lifted else timeouts.lifted(run.connection)

    def _give_back(self, run: Executor) -> None:
        returned = list(self._ownership.handed_back)
        if not returned:
            return
        with self._without_timeouts(run):
            leases.release(run, self._instance, returned)
        # Remove the leases from the list only after the release. If the release fails, the next round of the
        # coordinator repeats the release. Without a release, no process could acquire these queues until the term of
        # their leases ends.
        for lease in returned:
            self._ownership.handed_back.popleft()
            self._forget(lease)
            self._broadcast.returned(lease)
            if self._awaited.get(lease.key) is lease:
                del self._awaited[lease.key]
        notify(run, Channel.SHARED)

    def _drop_untrusted(self) -> None:
        for queue in [queue for queue in self._queues.values() if not queue.trusted()]:
            self._lose(queue)

    def _lose(self, queue: OwnedQueue) -> None:
        self._forget(queue.lease)
        self._ownership.emit(Change.LOST, queue)

    def _forget(self, lease: Lease) -> None:
        queue = self._queues.get(lease.key)
        if queue is not None and queue.lease is lease:
            del self._queues[lease.key]
            self._leaving.discard(lease.key)

    def _follow(self, run: Executor, states: Mapping[int, GroupState]) -> None:
        affected = [group_id for group_id, state in states.items() if state.has_quarantined]
        quarantined = quarantine.of_groups(run, affected)
        for group_id, state in states.items():
            group = self._groups[group_id]
            found = (state.paused, state.generation, quarantined.get(group_id, {}))
            if found != (group.paused, group.generation, group.quarantined):
                group.paused, group.generation, group.quarantined = found
                self._ownership.wake_dispatcher()

    def _rebalance(self, run: Executor, life: UUID, look: GroupSnapshot) -> None:
        for group_id in self._shared_groups:
            of_group = [queue for queue in look.queues if queue.key[0] == group_id]
            mine = rebalance.share(self._instance, look.members[group_id], of_group)
            for key in [key for key in self._queues if key[0] == group_id and key not in mine]:
                self._let_go(key)
            free = [
                queue
                for queue in of_group
                if queue.key in mine
                and queue.key not in self._queues
                and queue.key not in self._awaited
                and queue.key not in self._ownership.blocked
                # If the row of a queue names this instance as owner but this process has no lease, the row is from
                # another life of the server.
                and (queue.owner in (None, self._instance) or queue.expired)
            ]
            if free:
                self._acquire(run, self._groups[group_id], free, life)

    def _compare(self, queues: Sequence[QueueState], stopped: Collection[QueueKey]) -> None:
        """Detect leases that an offset reset has fenced, and queues that were stopped or resumed in the database."""
        for queue in queues:
            owned = self._queues.get(queue.key)
            if owned is None:
                continue
            is_stopped = queue.stopped is not None
            if queue.epoch != owned.lease.epoch or queue.owner != self._instance:
                self._lose(owned)
            elif is_stopped != (queue.key in stopped):
                self._ownership.emit(Change.STOPPED if is_stopped else Change.RESUMED, owned)

    def _let_go(self, key: QueueKey) -> None:
        if key not in self._leaving:
            self._leaving.add(key)
            self._ownership.emit(Change.HAND_OVER, self._queues[key])

    def _acquire(self, run: Executor, group: ConsumingGroup, free: Sequence[QueueState], life: UUID) -> None:
        queue_ids = sorted(queue.key[1] for queue in free)
        obtained = leases.acquire(run, self._instance, group.group_id, queue_ids, life=life, term_seconds=self._term)
        if not obtained:
            return
        try:
            self._take_up(run, group, obtained, {queue.key: queue for queue in free})
        except BaseException:
            # This process does not use the leases that it has just stored in the database, so it releases these leases
            # now. If the leases stayed in the database, no process could consume their queues until the term of the
            # leases ends.
            self._ownership.handed_back.extend(lease for lease in obtained if lease.key not in self._queues)
            raise

    def _take_up(
        self,
        run: Executor,
        group: ConsumingGroup,
        obtained: Sequence[Lease],
        states: Mapping[QueueKey, QueueState],
    ) -> None:
        # Read the groups again: a reset may have raised the generation, and queues acquired now belong to the new
        # generation.
        self._follow(run, members.groups(run, list(self._groups)))
        queue_ids = [lease.key[1] for lease in obtained]
        positions = offsets.load(run, group.group_id, queue_ids)
        lowest = floors(run, queue_ids)
        sent_away = send_back.sent_away(run, group.group_id, queue_ids)
        by_topic = {subscribed.subscription.topic: subscribed for subscribed in group.subscribed.values()}
        for lease in obtained:
            state = states[lease.key]
            if state.topic is None:
                subscribed, name = None, f"%RETRY%{group.name}"
            else:
                subscribed, name = by_topic[state.topic], f"{state.topic}/{state.number}"
            queue = OwnedQueue(lease, group, subscribed, name, positions[lease.key[1]])
            queue.skip_to(lowest[lease.key[1]])
            queue.sent_away_before(sent_away[lease.key[1]])
            if state.stopped is not None:
                queue.stop()
            self._queues[lease.key] = queue
            self._ownership.emit(Change.ACQUIRED, queue)

    def _leave(self, lent: BrokerConnection | None) -> None:
        """Release all leases and leave the groups. Each queue of this process is already drained or lost."""
        held = {lease.key: lease for lease in self._ownership.handed_back}
        held |= {key: queue.lease for key, queue in self._queues.items()}
        if lent is None or lent.closed or self._connection is not None:
            lent = self._connected()
        with lent.within(time.monotonic() + self._term) as connection:
            run = Executor(connection, self._database.schema)
            if held:
                leases.release(run, self._instance, list(held.values()))
            quarantine.end_attempts(run, self._instance)
            members.leave_groups(run, self._instance)
            notify(run, Channel.SHARED)
