"""The sequencer: the only writer of the queues.

It reads decisions by snapshot (an id cursor would lose transactions that commit late, an xmin horizon would
stall behind any open one) and appends their messages with gapless offsets, in one transaction with a tick that
says how far it has read. Any number may run: all but one collide on the tick's number and roll back whole.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg.errors import DeadlockDetected, SerializationFailure, UniqueViolation

from outbox import faults
from outbox.broker.database import timeouts
from outbox.broker.database.arrays import bigints, integers, raw_cursor_on, uuids, xids
from outbox.broker.database.connection import BrokerDatabase, Connection
from outbox.broker.database.executor import Executor
from outbox.broker.database.snapshot import Snapshot
from outbox.broker.database.statement import Statement
from outbox.broker.sequencer import key_order_sql, tick_sql
from outbox.broker.sequencer.takeover import TickState, adopt, prepare
from outbox.broker.transaction import half_scan
from outbox.transaction import CheckSettings

logger = logging.getLogger(__name__)

_Cursor = psycopg.RawCursor[tuple[Any, ...]]

FULL_EVERY: Final = 500
HINT_AFTER_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class TickCounts:
    """What one pass did.

    `decisions` read (of both kinds), `appended` queue entries, messages `held` behind an undecided one and
    `released`, `scheduled` for later, `due` scheduled ones taken. `more`: a backlog is left. `collided`: nothing was
    done, because another leader was faster or other topics are FIFO now. `next_due_seconds`: when the next scheduled
    message is due, None without one.
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


@dataclass
class _Plan:
    """What was found out about FIFO messages before a tick."""

    fifo_read: bool = False
    hold: list[int] = field(default_factory=list)
    release: list[int] = field(default_factory=list)


class _FifoUnread(Exception):
    """The tick met FIFO half messages that must be looked at first; nothing was done."""


class _Outdated(Exception):
    """What is in memory is not how it stands any more: another leader has ticked, or other topics are FIFO now."""


class Sequencer:
    """Ticks for one broker. Not thread-safe; its position in memory lives and dies with the connection used.

    `batch` bounds the messages of a tick (softly: one transaction's decisions stay together).
    """

    def __init__(
        self, database: BrokerDatabase, owner: UUID, *, batch: int = 20_000, check: CheckSettings | None = None
    ) -> None:
        self._schema = database.schema
        self._local = not timeouts.lasts(database)
        self._owner = owner
        self._batch = batch
        self._check = check or CheckSettings()
        self._connection: Connection | None = None
        self._state: TickState | None = None

    def run_once(self, connection: Connection) -> TickCounts:
        """One bounded tick on an autocommit connection; does nothing when nothing is new.

        Errors of the connection are the caller's to handle; the next call starts from the stored tick.
        """
        try:
            state = self._adopted(connection)
            faults.point("sequencer.before_tick")
            counts = self._tick(connection, state)
            faults.point("sequencer.after_tick")
            self._hint(connection, state)
            return counts
        except (UniqueViolation, SerializationFailure, DeadlockDetected, _Outdated) as error:
            logger.info("sequencer %s reads the stored position again: %s", self._owner, error)
            self._forget(connection)
            return TickCounts(collided=True, more=True)
        except BaseException:
            self._forget(connection)
            raise

    def _adopted(self, connection: Connection) -> TickState:
        if self._state is None or self._connection is not connection:
            self._state = adopt(Executor(connection, self._schema), self._check, local=self._local)
            self._connection = connection
        return self._state

    def _forget(self, connection: Connection) -> None:
        # What is in memory may be ahead of what was committed: the next call reads the stored tick.
        self._state = self._connection = None
        if not connection.closed:
            try:
                connection.rollback()
            except psycopg.Error:
                connection.close()

    def _tick(self, connection: Connection, state: TickState) -> TickCounts:
        if state.order.is_idle:
            try:
                return self._tick_at_once(connection, state)
            except _FifoUnread:
                pass
        return self._tick_in_order(connection, state)

    def _tick_at_once(self, connection: Connection, state: TickState) -> TickCounts:
        """One round trip: right as long as no FIFO half message is undecided."""
        with raw_cursor_on(connection) as cursor:
            with connection.pipeline():
                # Sent as one: after a tick that failed, PostgreSQL skips the COMMIT, and the error surfaces here.
                self._begin(connection, tick_sql.BEGIN)
                self._append(cursor, state, _Plan())
                faults.point("sequencer.mid_tick")
                connection.execute(tick_sql.COMMIT, prepare=True)
            return self._advance(state, cursor.fetchone(), _Plan())

    def _tick_in_order(self, connection: Connection, state: TickState) -> TickCounts:
        """Two round trips in one snapshot: look at the FIFO messages, then tick with what must wait."""
        with raw_cursor_on(connection) as cursor:
            with connection.pipeline():
                self._begin(connection, tick_sql.BEGIN_REPEATABLE)
                self._execute(cursor, key_order_sql.READ_FIFO, self._reading(state))
            rows = cursor.fetchall()
            let_go = self._released_by_parking(connection, state)
            plan = self._plan(state, rows, let_go)
            faults.point("sequencer.mid_tick")
            with connection.pipeline():
                self._append(cursor, state, plan)
                connection.execute(tick_sql.COMMIT, prepare=True)
            return self._advance(state, cursor.fetchone(), plan)

    def _begin(self, connection: Connection, statement: bytes) -> None:
        connection.execute(statement, prepare=True)
        if self._local:
            prepare(connection, local=True)

    def _append(self, cursor: _Cursor, state: TickState, plan: _Plan) -> None:
        parameters = self._reading(state) | {
            "tick_id": state.tick_id,
            "heads": bigints(state.heads[1:]),
            "fifo_topics": integers(state.fifo_topics),
            "is_full": (state.tick_id + 1) % FULL_EVERY == 0,
            "fifo_read": plan.fifo_read,
            "hold": bigints(plan.hold),
            "release": bigints(plan.release),
        }
        self._execute(cursor, tick_sql.TICK, parameters)

    def _execute(self, cursor: _Cursor, statement: Statement, parameters: dict[str, Any]) -> None:
        text, names = statement.numbered(self._schema)
        cursor.execute(text, [parameters[name] for name in names], prepare=True)

    def _reading(self, state: TickState) -> dict[str, Any]:
        return {
            "incarnation": state.incarnation,
            "snapshot": state.snapshot.text,
            "xmax": str(state.snapshot.xmax),
            "xip": xids(state.snapshot.in_progress),
            "half_xmax": str(state.half_snapshot.xmax),
            "half_xip": xids(state.half_snapshot.in_progress),
            "batch": self._batch,
        }

    def _released_by_parking(self, connection: Connection, state: TickState) -> list[int]:
        blockers = state.order.blockers()
        if not blockers:
            return []
        run = Executor(connection, self._schema)
        return [log_id for (log_id,) in run.rows(key_order_sql.RELEASED_BY_PARKING, {"ids": uuids(blockers)})]

    def _plan(self, state: TickState, rows: list[tuple[Any, ...]], let_go: list[int]) -> _Plan:
        order, now = state.order, time.monotonic()
        for what, log_id, topic_id, key, transaction_id in rows:
            if what == "h":
                order.open(log_id, (topic_id, key), transaction_id)
        # All of this tick's decisions first: a message decided here must not wait for another decided here.
        order.settle(row[1] for row in rows if row[0] in "cr")
        order.settle(let_go)
        plan = _Plan(fifo_read=True, release=order.release(self._batch))
        # In the order of the log: a message that must wait makes the later ones of its key wait too.
        for what, log_id, topic_id, key, _ in sorted(rows, key=lambda row: row[1]):
            if what in "cd" and order.must_wait(log_id, (topic_id, key)):
                order.hold(log_id, (topic_id, key), now)
                plan.hold.append(log_id)
        return plan

    def _advance(self, state: TickState, row: tuple[Any, ...] | None, plan: _Plan) -> TickCounts:
        assert row is not None
        newest, fifo_known, unread, seen, stored, more, decisions, appended, held, released, scheduled, due = row[:12]
        queue_ids, heads, next_due_seconds = row[12:]
        if not newest:
            raise _Outdated(f"another leader ticked: {state.tick_id} is not the newest tick any more")
        if not fifo_known:
            raise _Outdated("a topic has become FIFO or is not any more")
        if unread:
            raise _FifoUnread
        if plan.fifo_read or not more:
            # Else what is beyond the cut has not been looked at.
            state.half_snapshot = Snapshot.parse(seen)
        if stored is not None:
            state.tick_id += 1
            state.snapshot = Snapshot.parse(stored)
            state.set_heads(queue_ids, heads)
        return TickCounts(
            ticked=stored is not None,
            decisions=decisions,
            appended=appended,
            held=held,
            released=released,
            scheduled=scheduled,
            due=due,
            more=more or (plan.fifo_read and state.order.has_releasable),
            next_due_seconds=next_due_seconds,
        )

    def _hint(self, connection: Connection, state: TickState) -> None:
        blockers = state.order.hints(time.monotonic(), HINT_AFTER_SECONDS)
        if blockers:
            half_scan.hint_checks(Executor(connection, self._schema), blockers, settings=self._check)
