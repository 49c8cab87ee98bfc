"""The sequencer is the only writer of the queues.

The sequencer reads the decisions that the snapshot of the last tick did not contain. A cursor over ids would miss
transactions that commit late. A sequencer that reads up to the oldest running transaction would wait for any open
transaction. The sequencer appends the messages to the queues with gapless offsets. In the same transaction, the
sequencer stores a tick, which records how far the sequencer has read. Any number of sequencers may run at once, because
they collide on the number of the tick. One sequencer commits, and each of the others rolls back its whole transaction.

See decision 130.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Final, Self, TypeAlias
from uuid import UUID

import psycopg
from psycopg.errors import DeadlockDetected, InvalidSqlStatementName, SerializationFailure, UniqueViolation

from outbox.broker.database import timeouts
from outbox.broker.database.arrays import uuids
from outbox.broker.database.connection import BrokerDatabase, Connection
from outbox.broker.database.executor import Executor, Snapshot
from outbox.broker.database.notify import Channel
from outbox.broker.database.sender import AfterTick, RoundTrip, Row
from outbox.broker.database.statement import Statement
from outbox.broker.sequencer.key_order import Key
from outbox.broker.sequencer.takeover import BEGIN_REPEATABLE, COMMIT, TICK_SETTINGS, TickState, adopt
from outbox.broker.transaction import half_scan
from outbox.transaction import CheckSettings
from outbox.utils import faults

logger = logging.getLogger(__name__)

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

# Reads the FIFO messages that the next tick will find in the same snapshot, as rows (what, log_id, topic_id, key,
# transaction_id).
#   h: a half row that became visible   c, r: a message decided COMMIT (and due now) or ROLLBACK
#   d: a delayed message that is due
_READ_FIFO: Final = Statement("""
WITH edge AS MATERIALIZED (
    SELECT {schema}.decisions_cut(%(xmax)s::xid8, %(batch)s::bigint) AS cut
), fifo AS MATERIALIZED (
    SELECT topic_id FROM {schema}.topic WHERE 'FIFO' = ANY (message_types)
), fresh AS (
    SELECT decision, log_ids FROM {schema}.op_log
    WHERE xid >= %(xmax)s::xid8 AND xid < (SELECT cut FROM edge)
    UNION ALL
    SELECT decision, log_ids FROM {schema}.op_log WHERE xid = ANY (%(xip)s::xid8[])
), due AS (
    SELECT log_id, queue_id FROM {schema}.scheduled WHERE due_at >= %(due_from)s AND due_at <= now()
    ORDER BY due_at, schedule_id LIMIT %(batch)s
), half AS (
    SELECT * FROM {schema}.commit_log
    WHERE half AND xid >= %(half_xmax)s::xid8 AND xid < pg_snapshot_xmax(pg_current_snapshot())
    UNION ALL
    SELECT * FROM {schema}.commit_log WHERE half AND xid = ANY (%(half_xip)s::xid8[])
), beyond AS (
    SELECT log_ids FROM {schema}.op_log
    WHERE xid >= greatest((SELECT cut FROM edge), %(half_xmax)s::xid8) AND xid < pg_snapshot_xmax(pg_current_snapshot())
      AND decision = 'C'
    UNION ALL
    SELECT log_ids FROM {schema}.op_log
    WHERE xid = ANY (%(half_xip)s::xid8[]) AND xid >= (SELECT cut FROM edge) AND decision = 'C'
)
SELECT 'h', log_id, topic_id, key, transaction_id FROM half JOIN fifo USING (topic_id)
WHERE deliver_at IS NULL
  -- It was decided and read already, and appears only now because its transaction id comes from before a restore.
  AND NOT EXISTS (SELECT FROM {schema}.op_log op
                  WHERE op.transaction_id = half.transaction_id
                    AND pg_visible_in_snapshot(op.xid, %(snapshot)s::pg_snapshot))
UNION ALL
SELECT 'h', log.log_id, topic_id, key, transaction_id
FROM beyond CROSS JOIN LATERAL unnest(log_ids) AS one (log_id)
CROSS JOIN LATERAL (SELECT * FROM {schema}.commit_log WHERE log_id = one.log_id AND NOT half OFFSET 0) AS log
JOIN fifo USING (topic_id)
WHERE deliver_at IS NULL
UNION ALL
SELECT CASE decision WHEN 'C' THEN 'c' ELSE 'r' END, log.log_id, topic_id, key, NULL
FROM fresh CROSS JOIN LATERAL unnest(log_ids) AS one (log_id)
CROSS JOIN LATERAL (SELECT * FROM {schema}.commit_log WHERE log_id = one.log_id OFFSET 0) AS log
JOIN fifo USING (topic_id)
WHERE decision = 'R' OR deliver_at IS NULL OR deliver_at <= now()
UNION ALL
SELECT 'd', log.log_id, topic_id, key, NULL
FROM due CROSS JOIN LATERAL (SELECT * FROM {schema}.commit_log WHERE log_id = due.log_id OFFSET 0) AS log
JOIN fifo USING (topic_id)
WHERE due.queue_id IS NULL
""")

# The newest `parked_at` of all transactions that are parked now.
_NEWEST_PARKED: Final = Statement("SELECT max(parked_at) FROM {schema}.pending_check WHERE parked_at IS NOT NULL")

# Finds the messages of transactions that were parked since `since`, and of the parked transactions in `ids`. Returns
# only messages on topics where a parked message does not block its key.
_RELEASED_BY_PARKING: Final = Statement("""
WITH pending AS (
    SELECT transaction_id, log_id FROM {schema}.pending_check
    WHERE parked_at IS NOT NULL AND parked_at >= %(since)s::timestamptz
    UNION
    SELECT transaction_id, log_id FROM {schema}.pending_check
    WHERE parked_at IS NOT NULL AND transaction_id = ANY (%(ids)s::uuid[])
)
SELECT log.log_id
FROM pending
CROSS JOIN LATERAL (SELECT xid FROM {schema}.commit_log WHERE log_id = pending.log_id OFFSET 0) AS first
CROSS JOIN LATERAL (SELECT log_id, topic_id FROM {schema}.commit_log
                    WHERE half AND xid = first.xid AND transaction_id = pending.transaction_id OFFSET 0) AS log
JOIN {schema}.topic ON topic.topic_id = log.topic_id
WHERE on_park = 'release'
""")


FULL_EVERY: Final = 500
HINT_AFTER_SECONDS: Final = 1.0
# Two processes may park transactions at the same time. The transaction that commits later may have the earlier
# `parked_at`, and a search for newer times would miss its row. So the sequencer reads all parked transactions at this
# interval (seconds).
LOOK_AT_ALL_PARKED_SECONDS: Final = 10.0
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


@dataclass
class _Plan:
    """The FIFO messages that the next tick must hold or release."""

    has_looked: bool = False
    hold: list[int] = field(default_factory=list)
    release: list[int] = field(default_factory=list)


# A FIFO message that the next tick will find in its snapshot: what, log id, topic id, key, transaction id. The values
# of `what` are listed at _READ_FIFO. The transaction id is None unless `what` is "h". A plain tuple, because a tick may
# read thousands of FIFO messages.
_Seen: TypeAlias = tuple[str, int, int, str, UUID | None]


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
        obstacle, seen, stored, more, *counts, next_due_seconds, nothing_due_before, grown, is_heard, met = [
            None if one is None else one.decode() for one in row
        ]
        if obstacle is not None:
            return cls(obstacle, "", None, "", False, [], TickCounts())
        decisions, appended, held, released, scheduled, due = [int(one or 0) for one in counts]
        return cls(
            None,
            seen or "",
            stored,
            nothing_due_before or "-infinity",
            is_heard == "t",
            [(log_id, (topic_id, key)) for log_id, topic_id, key in json.loads(met or "[]")],
            TickCounts(
                ticked=stored is not None,
                decisions=decisions,
                appended=appended,
                held=held,
                released=released,
                scheduled=scheduled,
                due=due,
                more=more == "t",
                next_due_seconds=None if next_due_seconds is None else float(next_due_seconds),
                grown=grown,
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
        if not state.is_entangled and not state.must_look(now):
            try:
                return self._tick_at_once(trip, state)
            except _MustLook:
                pass
        return self._tick_in_order(trip, connection, state)

    def _tick_at_once(self, trip: RoundTrip, state: TickState) -> TickCounts:
        """Make a tick in one round trip.

        If FIFO messages may appear while other messages are open or held, the tick needs two round trips, because only
        this process knows the order of FIFO messages.
        """
        asks = state.meets_fifo and not state.order.is_idle
        self._begin(trip)
        tick = self._append(trip, state, _Plan(), asks=asks)
        faults.point("sequencer.mid_tick")
        if not asks:
            return self._commit(trip, state, _Plan(), tick)
        ticked = _Ticked.parse(trip.finish()[tick][0])
        if not all(state.order.is_apart(*one) for one in ticked.met):
            trip.send(_ROLLBACK)
            trip.finish()
            raise _MustLook
        state.meets_fifo = bool(ticked.met) or not ticked.counts.decisions
        return self._commit(trip, state, _Plan(), tick, ticked)

    def _tick_in_order(self, trip: RoundTrip, connection: Connection, state: TickState) -> TickCounts:
        """Make a tick in two round trips with one snapshot.

        The first round trip reads the FIFO messages. The second round trip makes the tick, and tells the server which
        messages to hold and which held messages to release.
        """
        self._begin(trip)
        # psycopg converts the rows, because there may be thousands.
        reading = {name: None if value is None else value.decode() for name, value in self._reading(state).items()}
        trip.send_adapted(_READ_FIFO, reading)
        trip.send(_NEWEST_PARKED)
        *_, messages, [(newest_parked,)] = trip.finish()
        order = state.order
        state.is_entangled = any(
            what == "h" or not order.is_apart(log_id, (topic_id, key)) for what, log_id, topic_id, key, _ in messages
        )
        state.meets_fifo = bool(messages)
        plan = self._plan(state, messages, self._released_by_parking(connection, state, newest_parked))
        faults.point("sequencer.mid_tick")
        tick = self._append(trip, state, plan)
        return self._commit(trip, state, plan, tick)

    def _begin(self, trip: RoundTrip) -> None:
        trip.send(BEGIN_REPEATABLE)
        if self._local:
            trip.send(timeouts.LIFT, {"local": b"true"})
            trip.send(TICK_SETTINGS, {"local": b"true"})

    def _append(self, trip: RoundTrip, state: TickState, plan: _Plan, *, asks: bool = False) -> int:
        parameters = self._reading(state) | {
            "tick_id": b"%d" % state.tick_id,
            "incarnation": b"%d" % state.incarnation,
            "life": state.life.bytes.hex().encode(),
            "instance": self._owner.bytes.hex().encode(),
            "fifo_topics": _array(state.fifo_topics) if state.fifo_topics else _EMPTY,
            "parked": state.newest_parked,
            "is_waiting": _BOOLEAN[not state.order.is_idle],
            "is_asking": _BOOLEAN[asks],
            "is_full": _BOOLEAN[(state.tick_id + 1) % FULL_EVERY == 0],
            "has_looked": _BOOLEAN[plan.has_looked],
            "hold": _array(plan.hold) if plan.hold else _EMPTY,
            "release": _array(plan.release) if plan.release else _EMPTY,
        }
        return trip.send(_TICK, parameters)

    def _commit(
        self, trip: RoundTrip, state: TickState, plan: _Plan, tick: int, ticked: _Ticked | None = None
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

    def _released_by_parking(self, connection: Connection, state: TickState, newest_parked: bytes | None) -> list[int]:
        now, since = self._clock(), None
        if now >= state.look_at_all_parked_at:
            since, state.look_at_all_parked_at = "-infinity", now + LOOK_AT_ALL_PARKED_SECONDS
        elif newest_parked != state.newest_parked:
            since = "-infinity" if state.newest_parked is None else state.newest_parked.decode()
        state.newest_parked = newest_parked
        blockers = state.order.new_blockers()
        if since is None and not blockers:
            return []
        run = Executor(connection, self._schema)
        parameters = {"since": since or "infinity", "ids": uuids(blockers)}
        return [log_id for (log_id,) in run.rows(_RELEASED_BY_PARKING, parameters)]

    def _plan(self, state: TickState, messages: Sequence[_Seen], let_go: list[int]) -> _Plan:
        order, now = state.order, self._clock()
        for what, log_id, topic_id, key, transaction_id in messages:
            if what == "h" and transaction_id is not None:
                order.open(log_id, (topic_id, key), transaction_id)
        # First add all decisions that this tick reads. Otherwise a message could wait for an earlier message
        # although the same tick reads the decision of that earlier message.
        order.close(log_id for what, log_id, *_ in messages if what in "cr")
        order.close(let_go)
        plan = _Plan(has_looked=True, release=order.release(self._batch))
        if order.is_idle:
            return plan
        # Process the messages in the order of the log. If a message must wait, the later messages of its key must wait,
        # too.
        for what, log_id, topic_id, key, _ in sorted(messages, key=itemgetter(1)):
            if what in "cd" and order.must_wait(log_id, (topic_id, key)):
                order.hold(log_id, (topic_id, key), now)
                plan.hold.append(log_id)
        return plan

    def _advance(self, state: TickState, ticked: _Ticked, plan: _Plan) -> TickCounts:
        if ticked.obstacle == "life":
            raise _Outdated("the server has restarted")
        if ticked.obstacle == "overtaken":
            raise _Outdated(f"another leader has made a tick: tick {state.tick_id} is not the newest any more")
        if ticked.obstacle == "topics":
            raise _Outdated("a topic has become FIFO, or is no longer FIFO")
        if ticked.obstacle is not None:
            raise _MustLook
        if plan.has_looked or not ticked.counts.more:
            # `half_snapshot` does not change if the tick left rows unread, and this process did not read the FIFO
            # messages before the tick. The unread rows may contain FIFO messages.
            state.half_snapshot = Snapshot.parse(ticked.seen)
        state.due_from = ticked.nothing_due_before.encode()
        if ticked.stored is not None:
            state.tick_id += 1
            state.snapshot = Snapshot.parse(ticked.stored)
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


_EMPTY: Final = b"{}"
_BOOLEAN: Final = {False: b"false", True: b"true"}
