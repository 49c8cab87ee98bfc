"""The leader loop: acquire the leader lease, make ticks, run the background work, and release the lease.

The broker process runs this loop on its own connection (outbox/broker/process.py). If a worker has only one consumer
process, that process leads (`LeadingConsumer`). This consumer process makes the ticks and fetches the queued messages
on the same database session. With a separate broker process, a message on its way from commit to handler would need one
more process, one more notification and two more database sessions. The broker process of a worker with one consumer
process is a stand-in: it leads while the consumer process does not lead (docs/decisions/163).

The `Sequencer` makes the ticks, and is the only writer of the queues. It reads the decisions that the snapshot of the
last tick did not contain. A cursor over ids would miss transactions that commit late, and a sequencer that reads up to
the oldest running transaction would wait for any open transaction. It appends the messages to the queues with gapless
offsets. In the same transaction it stores a tick, which records how far it has read. Any number of sequencers may run
at once, because they collide on the number of the tick: one of them commits, and each of the others rolls back its
whole transaction.

See decision 130.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, Self
from uuid import UUID

import psycopg
from psycopg.errors import DeadlockDetected, InvalidSqlStatementName, SerializationFailure, UniqueViolation

from outbox import hooks
from outbox.broker.database import timeouts
from outbox.broker.database.connection import BrokerDatabase, Connection
from outbox.broker.database.executor import Executor, Snapshot
from outbox.broker.database.notify import Announcements, Channel, listen, unlisten
from outbox.broker.database.sender import AfterTick, RoundTrip, Row
from outbox.broker.database.statement import Statement
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.maintenance.service import maintenance
from outbox.broker.operations.summary import COUNT_SECONDS, summaries
from outbox.broker.schema.refusals import next_step
from outbox.broker.sequencer.fifo import NEWEST_PARKED, READ_FIFO, Plan, plan_of, released_by_parking
from outbox.broker.sequencer.key_order import Key
from outbox.broker.sequencer.leader_lease import DEFAULT_TERM_SECONDS, LeaderLease
from outbox.broker.sequencer.takeover import BEGIN_REPEATABLE, COMMIT, TICK_SETTINGS, TickState, adopt
from outbox.broker.transaction import half_scan
from outbox.errors import OutboxError
from outbox.transaction import CheckSettings
from outbox.utils import faults, measures
from outbox.utils.backoff import Backoff
from outbox.utils.periodic import BackgroundLoop
from outbox.utils.safe_text import class_name, printable, shown_text

logger = logging.getLogger(__name__)


# -- the leader ------------------------------------------------------------------------------------


# How long a consumer process does not lead after its tick has failed. During this pause, the broker process of the same
# worker leads.
_REST: Final = Backoff(first_seconds=1.0, longest_seconds=30.0, healthy_seconds=10.0)

# The leader measures the rate of messages over this time (seconds).
_LOAD_SECONDS: Final = 0.1
# The weight of the newest tick in the mean time of a tick.
_NEWEST: Final = 0.2
# How many messages arrive in the time of one tick. From the first number on, the leader waits between ticks. From the
# second number on, it waits for the whole pause.
_LOAD_BEGINS: Final = 1.0
_LOAD_IS_FULL: Final = 1.5
# The whole pause is the time of this number of ticks, but at most the time in which this number of messages arrives. In
# a tick of so many messages, a message costs nearly as little as in a larger tick.
_PAUSE_TICKS: Final = 5
_ENOUGH_MESSAGES: Final = 100


@dataclass(frozen=True, slots=True)
class LeaderSettings:
    """The settings of the leader loop. All times are in seconds.

    `poll_seconds` is the longest wait until a candidate queries the database again. `pace_seconds` is the longest time
    for which a leader under load waits for more decisions before the next tick. With `stands_in`, a candidate leads
    only while no consumer process leads.
    """

    lease_term_seconds: float = DEFAULT_TERM_SECONDS
    poll_seconds: float = 1.0
    pace_seconds: float = 0.02
    maintenance_seconds: float = 30.0
    summary_seconds: float = COUNT_SECONDS
    check: CheckSettings = field(default_factory=CheckSettings)
    stands_in: bool = False


class PartWork(Protocol):
    """What the leader does for a part (`hooks.add_leader_work`).

    `look` and `look_at` belong to the leader's thread. `look_at`: the time of the next look on the monotonic clock.
    """

    loop: BackgroundLoop
    look_at: float

    def look(self, run: Executor, now: float) -> None:
        """Wake the loop if something is due. `now`: the monotonic clock. Raises psycopg.Error."""


class Leader:
    """One candidate for the leader lease; while a candidate holds this lease, it is the leader.

    The caller owns the connection and repeats two steps: it calls `lead`, and then waits for `wait_seconds` or for a
    notification.
    """

    def __init__(self, database: BrokerDatabase, *, settings: LeaderSettings | None = None) -> None:
        self._database = database
        self._settings = settings or LeaderSettings()
        self._decided_channel = Channel.DECIDED.name_in(database.schema)
        self.note = FailureNote(database, ProcessPart.SEQUENCING)
        self._loops: list[BackgroundLoop] = []
        self._part_works: list[PartWork] = []
        self.leads = False
        self._decided = False
        # `_look_at`: the time at which `lead` has work again if no notification arrives. `_gathers_until`: the time
        # until which the leader waits for more decisions before the next tick. `_rests_until`: the time at which the
        # pause after a failure ends.
        self._look_at = 0.0
        self._gathers_until = 0.0
        self._load = Load()
        self._rests_until = 0.0
        self._led_at = 0.0

    def begin(self, run: Executor, instance: UUID) -> None:
        """Begin on a new connection, and forget all data that was read on an earlier connection."""
        self._listens = timeouts.lasts(run.connection)
        if self._listens:
            timeouts.lift_for_session(run.connection)
        else:
            timeouts.lift_where_direct(run.connection)
        settings = self._settings
        self._instance = instance
        self._lease = LeaderLease(
            run.schema, instance, term_seconds=settings.lease_term_seconds, stands_in=settings.stands_in
        )
        self._work_of_parts = [hooks.resolved(path) for path in hooks.leader_work.values()]
        self._sequencer = Sequencer(self._database, instance, check=settings.check)
        self._look_at = self._gathers_until = 0.0

    def lead(
        self, run: Executor, announcements: Announcements, *, decided: bool, after: AfterTick | None = None
    ) -> str | None:
        """Make a tick if this process leads and a tick is due. Return which queues have grown (`TickCounts.grown`).

        `decided` says that there may be new decisions. If so, the server executes `after` in the round trip of the
        tick. Raises the errors of the connection and of the database.
        """
        now = time.monotonic()
        self._decided |= decided
        if now < self._act_at():
            return None
        after = after if self._decided else None
        self._decided = False
        try_again_in = self._lease.acquire_or_renew(run.connection)
        if try_again_in:
            self.note.worked()
            self._follow(run)
            self._look_at = now + min(try_again_in, self._settings.poll_seconds)
            return None
        if not self.leads:
            self._take_the_lead(run, now)
        for work in self._part_works:
            if now >= work.look_at:
                work.look(run, now)
        # This tick reads the decisions that were announced until now.
        announcements.discard(self._decided_channel)
        counts, began, ended = self._timed_tick(run, after)
        if not counts.collided:
            self.note.worked()
        self._look_at = now if counts.more else now + self._idle_seconds(counts, now)
        pause = self._load.pause_seconds(max(counts.decisions, counts.appended), began, ended - began)
        if pause and counts.decisions > 1 and not counts.more:
            self._decided, self._gathers_until = True, ended + min(pause, self._settings.pace_seconds)
        return counts.grown

    def wait_seconds(self) -> float:
        """Return how many seconds the caller may wait for a notification before it must call `lead` again."""
        return max(0.0, self._act_at() - time.monotonic())

    @property
    def is_gathering(self) -> bool:
        """Whether the leader delays the next tick to collect more decisions. If so, the caller waits before it reads
        notifications."""
        return time.monotonic() < self._gathers_until

    def interrupted(self, *, join: bool = False) -> None:
        """Note that the leader lease or the connection is lost, and stop the background work.

        If `join` is false, the method does not wait until the background work has ended, because this process may
        become leader again immediately.
        """
        self.leads = False
        loops, self._loops = self._loops, []
        for loop in loops:
            loop.stop()
        for loop in loops if join else []:
            loop.join()

    def end(self, run: Executor, *, join: bool = False) -> None:
        """Release the leader lease, so that another process can lead at once. Raises psycopg.Error."""
        if self.leads:
            self.interrupted(join=join)
            self._lease.release(run.connection)
        self.note.worked()

    def _act_at(self) -> float:
        return max(self._rests_until, self._gathers_until if self._decided else self._look_at)

    def _timed_tick(self, run: Executor, after: AfterTick | None) -> tuple[TickCounts, float, float]:
        """Make one tick and record its duration. After a collision, check the leader lease again.

        Return the counts, and the times (time.monotonic) at which the tick began and ended.
        """
        began = time.monotonic()
        counts = self._sequencer.run_once(run.connection, after)
        ended = time.monotonic()
        if counts.collided:
            self._lease.ask_again()
        if counts.ticked and measures.recorder is not None:
            measures.recorder.ticked(ended - began, counts.appended)
        return counts, began, ended

    def _idle_seconds(self, counts: TickCounts, now: float) -> float:
        """Return the time in seconds from `now`, when this tick began, to the next tick if no notification arrives."""
        waits = [self._settings.poll_seconds, self._settings.lease_term_seconds / 3]
        if self._part_works:
            waits += [max(0.0, work.look_at - now) for work in self._part_works]
        if counts.next_due_seconds is not None:
            waits.append(max(0.0, counts.next_due_seconds))
        return min(waits)

    def _take_the_lead(self, run: Executor, now: float) -> None:
        logger.info("leading the broker in schema %r", run.schema)
        if self._listens:
            listen(run, Channel.DECIDED)
        settings = self._settings
        # A thread can be started once only, so each lead has new loops.
        self._part_works = [work(self._database) for work in self._work_of_parts]
        self._loops = [
            maintenance(self._database, settings.check, every_seconds=settings.maintenance_seconds),
            summaries(self._database, self._instance, every_seconds=settings.summary_seconds),
            *(work.loop for work in self._part_works),
        ]
        for loop in self._loops:
            loop.start()
        self.leads, self._led_at = True, now

    def _follow(self, run: Executor) -> None:
        if not self.leads:
            return
        if self._lease.stands_in:
            logger.info("another process leads now; this process stands in, and leads again only if none does")
        else:
            logger.warning("this process has lost the leader lease: another process leads now")
        self.interrupted()
        self._stop_listening(run)

    def _stop_listening(self, run: Executor) -> None:
        if self._listens:
            unlisten(run, Channel.DECIDED)


class LeadingConsumer(Leader):
    """The SessionTask with which a consumer process leads.

    After an error in `lead`, the object logs the error and does not lead during a pause. The process continues to
    consume.
    """

    _failures = 0

    def lead(
        self, run: Executor, announcements: Announcements, *, decided: bool, after: AfterTick | None = None
    ) -> str | None:
        """Do the same as `Leader.lead`, but raise only psycopg.Error, and only if the connection is lost."""
        try:
            return super().lead(run, announcements, decided=decided, after=after)
        except Exception as error:
            pause = self._rest()
            self.note.failed(error)
            if run.connection.closed:
                raise psycopg.OperationalError(
                    f"the connection ended while this process made a tick: {shown_text(error)}"
                ) from error
            self._give_up(run, error, pause)
            return None

    def _rest(self) -> float:
        """Set the pause after a failure, and return its length in seconds.

        The pause also applies to the next connection. Without a pause, one connection after another would fail, and the
        process could not consume.
        """
        now = time.monotonic()
        self._failures = _REST.failures_in_a_row(self._failures, ran_seconds=now - self._led_at if self.leads else 0.0)
        pause = _REST.pause_seconds(self._failures)
        self._rests_until = now + pause
        return pause

    def _give_up(self, run: Executor, error: Exception, pause: float) -> None:
        self.interrupted()
        try:
            self._stop_listening(run)
            self._lease.release(run.connection)
        except psycopg.Error as further:
            logger.debug("the leader lease was not released: %s", further)
        expected = isinstance(error, psycopg.Error | OutboxError)
        logger.warning(
            "sequencing in a consumer process is interrupted, trying again in %.1f s: %s",
            pause,
            (shown_text(error) or class_name(error)) + next_step(error),
            exc_info=None if expected else printable(error),
        )


class Load:
    """The load of the leader, from which it computes how long it waits for more decisions before the next tick.

    Under load, the leader should wait, because one tick per message costs several times as much as one tick for several
    messages. Without load, it should not wait, because the wait would delay messages that arrive during a tick. The
    load is the number of messages that arrive in the time of one tick. So a leader on a slow or busy machine waits from
    a lower rate on, and for longer. Against a pause from a fixed rate on, the CPU behind the web process falls by 15 to
    60 %.
    """

    def __init__(self) -> None:
        self._messages = 0.0
        self._tick_seconds = 0.0
        self._at = 0.0

    def pause_seconds(self, messages: int, began: float, took: float) -> float:
        """Count a tick, and return how many seconds the leader should wait after it.

        `messages` is the number of messages of the tick, `began` the time (time.monotonic) at which it began, and
        `took` its duration in seconds.
        """
        self._messages = self._messages * math.exp((self._at - began) / _LOAD_SECONDS) + messages
        self._at = began
        if messages:
            self._tick_seconds += _NEWEST * (took - self._tick_seconds)
        per_second = self._messages / _LOAD_SECONDS
        load = per_second * self._tick_seconds
        if load <= _LOAD_BEGINS:
            return 0.0
        share = min(1.0, (load - _LOAD_BEGINS) / (_LOAD_IS_FULL - _LOAD_BEGINS))
        return share * min(_PAUSE_TICKS * self._tick_seconds, _ENOUGH_MESSAGES / per_second)


# -- ticks -----------------------------------------------------------------------------------------


# This statement calls an SQL function whose source is outbox/broker/schema/functions/make_tick.sql.
_TICK: Final = Statement("""
SELECT obstacle, seen, stored, more, decision_count, appended_count, held_count, released_count, scheduled_count,
       due_count, next_due_seconds, nothing_due_before, grown, is_heard, met
FROM {schema}.make_tick(
    own_life => %(life)s, own_instance => %(instance)s, last_tick => %(tick_id)s, own_incarnation => %(incarnation)s,
    seen_xmax => %(xmax)s, seen_xip => %(xip)s,
    half_xmax => %(half_xmax)s, half_xip => %(half_xip)s, known_fifo => %(fifo_topics)s, known_parked => %(parked)s,
    due_from => %(due_from)s, is_waiting => %(is_waiting)s, is_asking => %(is_asking)s,
    has_looked => %(has_looked)s, to_hold => %(hold)s, to_release => %(release)s,
    batch => %(batch)s, is_full_tick => %(is_full)s)
""")

# If the tick has appended entries and other consumer processes live, this statement notifies them. The sequencer
# executes it after the COMMIT of the tick, in a separate transaction that does not wait for the disk. If the
# notification were part of the tick's transaction, the commit of the tick would wait for all other commits with a
# notification. If few queues have new entries, the notification contains their ids, so that only the owners of these
# queues fetch. The row of a full tick has the heads of all queues, so its notification contains no ids.
_ANNOUNCE: Final = Statement("""
SELECT set_config('synchronous_commit', 'off', true),
       pg_notify(%(channel)s, CASE WHEN %(names_queues)s::boolean AND NOT is_full AND cardinality(queue_ids) <= 50
                                   THEN array_to_string(queue_ids, ' ') ELSE '' END)
FROM {schema}.tick WHERE tick_id = %(tick_id)s::bigint AND appended > 0
""")

_ROLLBACK: Final = Statement("ROLLBACK")

FULL_EVERY: Final = 500
HINT_AFTER_SECONDS: Final = 1.0
# A new row of `scheduled` may have a due time that is earlier than the last tick, and a search from the time of that
# tick on would miss the row. So the sequencer searches for all due rows at this interval (seconds).
LOOK_AT_ALL_DUE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class TickCounts:
    """The results of one call of `Sequencer.run_once`.

    `decisions`: how many decisions (COMMIT or ROLLBACK) were read. `appended`: how many entries were appended to
    queues. `held`: messages that must wait for an undecided message. `released`: held messages that became free.
    `scheduled`: messages stored for a later time. `due`: scheduled messages that became due and were processed. `more`:
    there is more work for the next tick now. `collided`: the sequencer did no work, because another leader was faster
    or the FIFO topics have changed. `next_due_seconds`: the time until the next scheduled message is due; None if there
    is none. `grown`: the ids of the queues that may have new entries, as text; '' for any queue, None for none.
    """

    ticked: bool = False
    decisions: int = 0
    appended: int = 0
    held: int = 0
    released: int = 0
    scheduled: int = 0
    due: int = 0
    more: bool = False
    collided: bool = False
    next_due_seconds: float | None = None
    grown: str | None = None


@dataclass(frozen=True, slots=True)
class _Ticked:
    """The result of _TICK.

    `is_heard`: another consumer process has to learn of the new entries. `met` has the log ids and keys of FIFO
    messages that the tick read as decided before this process had checked their order.
    """

    obstacle: str | None
    seen: str
    stored: str | None
    nothing_due_before: str
    is_heard: bool
    met: list[tuple[int, Key]]
    counts: TickCounts

    @classmethod
    def parse(cls, row: Row) -> Self:
        obstacle, seen, stored, more, *counts, next_due_seconds, nothing_due_before, grown, is_heard, met = row
        if obstacle is not None:
            return cls(obstacle.decode(), "", None, "", False, [], TickCounts())
        decisions, appended, held, released, scheduled, due = map(int, counts)
        return cls(
            None,
            seen.decode(),
            None if stored is None else stored.decode(),
            "-infinity" if nothing_due_before is None else nothing_due_before.decode(),
            is_heard == b"t",
            [] if met is None else [(log_id, (topic_id, key)) for log_id, topic_id, key in json.loads(met)],
            TickCounts(
                ticked=stored is not None,
                decisions=decisions,
                appended=appended,
                held=held,
                released=released,
                scheduled=scheduled,
                due=due,
                more=more == b"t",
                next_due_seconds=None if next_due_seconds is None else float(next_due_seconds),
                grown=None if grown is None else grown.decode(),
            ),
        )


class _MustLook(Exception):
    """The tick found FIFO messages whose order must be checked first, so the tick changed nothing."""


class _Outdated(Exception):
    """The data in memory is outdated: the server restarted, another leader ticked, or the FIFO topics have changed."""


class Sequencer:
    """Runs ticks for one broker. A sequencer is not thread-safe, and its position in memory belongs to one connection.

    `batch` limits the messages of a tick. A tick may exceed this limit, because all decisions that one database
    transaction has stored are read in the same tick. `clock` returns the seconds by which a tick finds out that a look
    or a hint is due.
    """

    def __init__(
        self,
        database: BrokerDatabase,
        owner: UUID,
        *,
        batch: int = 20_000,
        check: CheckSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schema = database.schema
        # Whether the sequencer applies its settings in each transaction, because behind a pooler the next transaction
        # may run in another session.
        self._local = True
        self._owner = owner
        self._batch = batch
        self._check = check or CheckSettings()
        self._clock = clock
        self._connection: Connection | None = None
        self._round_trip: RoundTrip | None = None
        self._state: TickState | None = None
        # The caller's statement of this call of `run_once`, and the rows of this statement.
        self._after: AfterTick | None = None
        self._answer: list[Row] | None = None

    def run_once(self, connection: Connection, after: AfterTick | None = None) -> TickCounts:
        """Run one bounded tick on an autocommit connection, if there is new work.

        With `after`, the tick and this statement take one round trip.

        The caller handles errors of the connection. After an error, the next call starts from the stored tick.
        """
        self._after, self._answer = after, None
        try:
            trip, state = self._adopted(connection)
            faults.point("sequencer.before_tick")
            counts = self._tick(trip, connection, state)
            faults.point("sequencer.after_tick")
            if not state.order.is_idle:
                self._hint(connection, state)
            if after is not None and self._answer is not None:
                after.answered(self._answer)
            return counts
        except (UniqueViolation, SerializationFailure, DeadlockDetected, InvalidSqlStatementName, _Outdated) as error:
            # This error is expected when another process has just become leader. Only the first line of PostgreSQL's
            # error text is logged, because the following lines have details such as the statement.
            reason = str(error).partition("\n")[0]
            logger.debug("sequencer %s reads the stored position again: %s", self._owner, reason)
            self._forget(connection)
            return TickCounts(collided=True, more=True)
        except BaseException:
            self._forget(connection)
            raise

    def _adopted(self, connection: Connection) -> tuple[RoundTrip, TickState]:
        if self._round_trip is None or self._connection is not connection:
            self._local = not timeouts.lasts(connection)
            self._round_trip = RoundTrip(connection, self._schema, prepared=None if self._local else {})
            self._state, self._connection = None, connection
        if self._state is None:
            run = Executor(connection, self._schema)
            self._state = adopt(run, self._check, now=self._clock(), local=self._local)
        return self._round_trip, self._state

    def _forget(self, connection: Connection) -> None:
        # The data in memory may be newer than the committed data, so the next call reads the stored tick.
        trip, self._round_trip, self._state = self._round_trip, None, None
        if not connection.closed:
            try:
                if trip is not None:
                    trip.abandon()
                # After a rollback, psycopg also drops all prepared statements of the connection.
                connection.rollback()
            except psycopg.Error:
                connection.close()

    def _tick(self, trip: RoundTrip, connection: Connection, state: TickState) -> TickCounts:
        now = self._clock()
        if now >= state.look_at_all_due_at:
            state.due_from, state.look_at_all_due_at = b"-infinity", now + LOOK_AT_ALL_DUE_SECONDS
        is_idle = state.order.is_idle
        if not state.is_entangled and (is_idle or not state.must_look(now)):
            try:
                return self._tick_at_once(trip, state, is_idle)
            except _MustLook:
                pass
        return self._tick_in_order(trip, connection, state)

    def _tick_at_once(self, trip: RoundTrip, state: TickState, is_idle: bool) -> TickCounts:
        """Make a tick in one round trip: BEGIN, `make_tick`, COMMIT, the caller's statement (a fetch), and NOTIFY
        outbox_queued if the last tick was heard. `is_idle`: no FIFO message is open or held.

        If FIFO messages may appear while other messages are open or held, the tick needs two round trips, because only
        this process knows the order of FIFO messages.
        """
        asks = state.meets_fifo and not is_idle
        self._begin(trip)
        tick = self._append(trip, state, _NO_PLAN, is_waiting=not is_idle, asks=asks)
        faults.point("sequencer.mid_tick")
        if not asks:
            return self._commit(trip, state, _NO_PLAN, tick)
        ticked = _Ticked.parse(trip.finish()[tick][0])
        if not all(state.order.is_apart(*one) for one in ticked.met):
            trip.send(_ROLLBACK)
            trip.finish()
            raise _MustLook
        state.meets_fifo = bool(ticked.met) or not ticked.counts.decisions
        return self._commit(trip, state, _NO_PLAN, tick, ticked)

    def _tick_in_order(self, trip: RoundTrip, connection: Connection, state: TickState) -> TickCounts:
        """Make a tick in two round trips with one snapshot.

        The first round trip reads the FIFO messages. The second round trip makes the tick, and tells the server which
        messages to hold and which held messages to release.
        """
        self._begin(trip)
        # psycopg converts the rows, because there may be thousands.
        reading = {name: None if value is None else value.decode() for name, value in self._reading(state).items()}
        trip.send_adapted(READ_FIFO, reading)
        trip.send(NEWEST_PARKED)
        *_, messages, [(newest_parked,)] = trip.finish()
        order = state.order
        state.is_entangled = any(
            what == "h" or not order.is_apart(log_id, (topic_id, key)) for what, log_id, topic_id, key, _ in messages
        )
        state.meets_fifo = bool(messages)
        now = self._clock()
        let_go = released_by_parking(Executor(connection, self._schema), state, newest_parked, now)
        plan = plan_of(order, messages, let_go, now, self._batch)
        faults.point("sequencer.mid_tick")
        tick = self._append(trip, state, plan, is_waiting=not order.is_idle)
        return self._commit(trip, state, plan, tick)

    def _begin(self, trip: RoundTrip) -> None:
        trip.send(BEGIN_REPEATABLE)
        if self._local:
            trip.send(timeouts.LIFT, {"local": b"true"})
            trip.send(TICK_SETTINGS, {"local": b"true"})

    def _append(self, trip: RoundTrip, state: TickState, plan: Plan, *, is_waiting: bool, asks: bool = False) -> int:
        parameters = self._reading(state) | {
            "tick_id": b"%d" % state.tick_id,
            "incarnation": b"%d" % state.incarnation,
            "life": state.life.bytes.hex().encode(),
            "instance": self._owner.bytes.hex().encode(),
            "fifo_topics": _array(state.fifo_topics) if state.fifo_topics else _EMPTY,
            "parked": state.newest_parked,
            "is_waiting": _BOOLEAN[is_waiting],
            "is_asking": _BOOLEAN[asks],
            "is_full": _BOOLEAN[(state.tick_id + 1) % FULL_EVERY == 0],
            "has_looked": _BOOLEAN[plan.has_looked],
            "hold": _array(plan.hold) if plan.hold else _EMPTY,
            "release": _array(plan.release) if plan.release else _EMPTY,
        }
        return trip.send(_TICK, parameters)

    def _commit(
        self, trip: RoundTrip, state: TickState, plan: Plan, tick: int, ticked: _Ticked | None = None
    ) -> TickCounts:
        """Commit the tick, execute the caller's statement, and notify the other processes of new entries.

        `tick`: the number of the statement in this round trip, unless an earlier one has returned `ticked`.

        If the notification fails, the consumers find the new entries at their next poll. The caller's statement comes
        first, because the notification is sent only at the end of the round trip. If the caller's statement fails, the
        server skips the notification, so it is sent in a round trip of its own.
        """
        commit = trip.send(COMMIT)
        after = self._after.send(trip) if self._after is not None else None
        announce = self._announce(trip, state, state.tick_id + 1) if state.is_heard else None
        found, error = trip.finish_all()
        if len(found) <= commit:
            raise error or psycopg.OperationalError("the connection ended during a tick")
        is_cut = after is not None and len(found) <= after
        if is_cut:
            logger.debug("the statement in the round trip of a tick failed: %s", error)
        elif after is not None:
            self._answer = found[after]
        ticked = ticked or _Ticked.parse(found[tick][0])
        counts = self._advance(state, ticked, plan)
        if counts.grown is None:
            return counts
        if not state.names_queues:
            counts = replace(counts, grown="")
        is_announced = announce is not None and len(found) > announce
        # `state.is_heard` was the answer of the last tick. If this tick has another one, the notification goes alone.
        if ticked.is_heard and not is_announced and (announce is None or is_cut):
            self._announce(trip, state, state.tick_id)
            announced, error = trip.finish_all()
            is_announced = bool(announced)
        if ticked.is_heard and not is_announced:
            logger.debug("the notification of consumers about new entries was not sent: %s", error)
        state.is_heard, state.names_queues = ticked.is_heard, is_announced or not ticked.is_heard
        return counts

    def _announce(self, trip: RoundTrip, state: TickState, tick_id: int) -> int:
        values = {
            "channel": Channel.QUEUED.name_in(self._schema).encode(),
            "tick_id": b"%d" % tick_id,
            "names_queues": _BOOLEAN[state.names_queues],
        }
        return trip.send(_ANNOUNCE, values)

    def _reading(self, state: TickState) -> dict[str, bytes | None]:
        return {
            "snapshot": state.snapshot.text.encode(),
            "xmax": b"%d" % state.snapshot.xmax,
            "xip": _array(state.snapshot.in_progress) if state.snapshot.in_progress else _EMPTY,
            "half_xmax": b"%d" % state.half_snapshot.xmax,
            "half_xip": _array(state.half_snapshot.in_progress) if state.half_snapshot.in_progress else _EMPTY,
            "due_from": state.due_from,
            "batch": b"%d" % self._batch,
        }

    def _advance(self, state: TickState, ticked: _Ticked, plan: Plan) -> TickCounts:
        if ticked.obstacle == "life":
            raise _Outdated("the server has restarted")
        if ticked.obstacle == "overtaken":
            raise _Outdated(f"another leader has made a tick: tick {state.tick_id} is not the newest any more")
        if ticked.obstacle == "topics":
            raise _Outdated("a topic has become FIFO, or is no longer FIFO")
        if ticked.obstacle is not None:
            raise _MustLook
        seen = Snapshot.parse(ticked.seen)
        if plan.has_looked or not ticked.counts.more:
            # `half_snapshot` does not change if the tick left rows unread, and this process did not read the FIFO
            # messages before the tick. The unread rows may contain FIFO messages.
            state.half_snapshot = seen
        state.due_from = ticked.nothing_due_before.encode()
        if ticked.stored is not None:
            state.tick_id += 1
            state.snapshot = seen if ticked.stored == ticked.seen else Snapshot.parse(ticked.stored)
        if plan.has_looked and state.order.has_releasable:
            return replace(ticked.counts, more=True)
        return ticked.counts

    def _hint(self, connection: Connection, state: TickState) -> None:
        blockers = state.order.hints(self._clock(), HINT_AFTER_SECONDS)
        if blockers:
            half_scan.hint_checks(Executor(connection, self._schema), blockers, settings=self._check)


def _array(values: Sequence[int]) -> bytes:
    """Return the text of an array of integers or transaction ids."""
    return b"{%s}" % ",".join(map(str, values)).encode()


_NO_PLAN: Final = Plan()
_EMPTY: Final = b"{}"
_BOOLEAN: Final = {False: b"false", True: b"true"}
