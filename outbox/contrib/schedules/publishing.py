"""The leader publishes the message of each due moment, exactly once.

One transaction locks the row of the schedule, appends the message to the log and moves `next_at`. So a crash stores
both changes or none, and of two leaders only one publishes. The transaction needs no leader lease, which only prevents
double work. The message id is computed from the moment, so the inbox knows a moment that a restore publishes again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

import psycopg

from outbox.broker.database import timeouts
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Channel, notify
from outbox.broker.database.statement import Statement
from outbox.broker.log.commit_log import append_decided
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.log.topics import TopicCatalog
from outbox.contrib.schedules.schedule import Missed, ScheduleRow, clock, lock_schedule
from outbox.errors import BrokerUnavailable, OutboxError
from outbox.message import Message
from outbox.utils.faults import point
from outbox.utils.ids import uuid7
from outbox.utils.periodic import BackgroundLoop
from outbox.utils.safe_text import shown_text

logger = logging.getLogger(__name__)

# The longest time between two looks of the leader at the schedules. A new or resumed schedule is due at most this much
# too late.
LONGEST_WAIT_SECONDS: Final = 10.0
# `Missed.SKIP` publishes a due moment that is at most this old.
SKIPPED_AFTER: Final = timedelta(minutes=5)
# `Missed.CATCH_UP` publishes at most this number of due moments, at most this many in one transaction.
MOST_MISSED: Final = 1000
_PER_TRANSACTION: Final = 100

_DUE: Final = Statement("""
SELECT producer_group, name FROM {schema}.schedule
WHERE paused_at IS NULL AND next_at <= %(now)s::timestamptz ORDER BY next_at, producer_group, name
""")
# A schedule with an error is tried again in the next pass, so it does not shorten the wait.
_WAIT: Final = Statement("""
SELECT extract(epoch FROM min(next_at) - %(now)s::timestamptz)::double precision
FROM {schema}.schedule WHERE paused_at IS NULL AND error IS NULL
""")
# A schedule that is due stays due until a pass has published it, so it does not shorten the wait for the others.
_LOOK: Final = Statement("""
SELECT coalesce(bool_or(next_at <= now.now), false),
       extract(epoch FROM min(next_at) FILTER (WHERE next_at > now.now) - now.now)::double precision
FROM (SELECT clock_timestamp() AS now) AS now
LEFT JOIN {schema}.schedule ON paused_at IS NULL
GROUP BY now.now
""")
_MOVE: Final = Statement("""
UPDATE {schema}.schedule
SET next_at = %(next_at)s, last_at = coalesce(%(last_at)s, last_at), error = NULL,
    last_message_id = coalesce(%(message_id)s, last_message_id)
WHERE producer_group = %(group)s AND name = %(name)s
""")
_FAIL: Final = Statement("""
UPDATE {schema}.schedule SET error = %(error)s
WHERE producer_group = %(group)s AND name = %(name)s AND error IS DISTINCT FROM %(error)s
""")

# With these errors, the database refuses the message of one schedule. The other schedules continue.
_REFUSED: Final = (psycopg.DataError, psycopg.IntegrityError, psycopg.InternalError, psycopg.ProgrammingError)


@dataclass(frozen=True, slots=True)
class ScheduleCounts:
    """The counts of one pass. `wait_seconds`: the time until the next pass has work."""

    published: int = 0
    dropped: int = 0
    failed: int = 0
    wait_seconds: float = LONGEST_WAIT_SECONDS


@dataclass(frozen=True, slots=True)
class _Due:
    """The due moments to publish now, the number of due moments without a message, and the new `next_at`."""

    moments: list[datetime]
    dropped: int
    next_at: datetime


def run_once(run: Executor, catalog: TopicCatalog, *, now: datetime | None = None) -> ScheduleCounts:
    """Publish the messages of all due schedules, on an autocommit connection. `now`: by default the database's clock.

    If a schedule fails, its row keeps the error, and the next pass tries it again. Raises psycopg.Error.
    """
    now = now or clock(run)
    published = dropped = failed = 0
    for group, name in run.rows(_DUE, {"now": now}):
        try:
            count, lost = _publish_due(run, catalog, group, name, now)
        except (OutboxError, ValueError, *_REFUSED) as error:
            logger.warning("schedule %r of producer group %r cannot be published: %s", name, group, shown_text(error))
            run.execute(_FAIL, {"group": group, "name": name, "error": shown_text(error)})
            failed += 1
            continue
        published, dropped = published + count, dropped + lost
    [wait] = run.one(_WAIT, {"now": now})
    wait = LONGEST_WAIT_SECONDS if wait is None else min(LONGEST_WAIT_SECONDS, max(0.0, wait))
    return ScheduleCounts(published, dropped, failed, wait)


def _publish_due(run: Executor, catalog: TopicCatalog, group: str, name: str, now: datetime) -> tuple[int, int]:
    with timeouts.lifted(run.connection):
        row = lock_schedule(run, group, name)
        # Another leader may have published the due moments while this process waited for the lock.
        if row is None or row.paused_at is not None or row.next_at > now:
            return 0, 0
        due = _due(row, now)
        messages = [row.message(at) for at in due.moments]
        _append(run, catalog, group, messages)
        point("schedule.after_append")
        last = {"last_at": due.moments[-1], "message_id": messages[-1].message_id} if messages else _NOTHING
        run.execute(_MOVE, {"group": group, "name": name, "next_at": due.next_at, **last})
    point("schedule.after_commit")
    if messages:
        notify(run, Channel.DECIDED)
    if due.dropped:
        logger.warning(
            "schedule %r of producer group %r: at least %d due moments since %s have no message (missed=%r)",
            name,
            group,
            due.dropped,
            row.next_at.isoformat(timespec="seconds"),
            row.missed,
        )
    return len(messages), due.dropped


_NOTHING: Final = {"last_at": None, "message_id": None}


def _append(run: Executor, catalog: TopicCatalog, group: str, messages: list[Message]) -> None:
    # Each message is a transaction of its own in the log, so a message that is stored already hinders no other one.
    for message in messages:
        append_decided(run, catalog, [message], producer_group=group, transactional=None)


def _due(row: ScheduleRow, now: datetime) -> _Due:
    cron = row.cron
    before = row.next_at - timedelta(seconds=1)
    following = cron.next(now) or datetime.max.replace(tzinfo=now.tzinfo)
    if row.missed == Missed.CATCH_UP:
        latest = cron.latest(before, now, MOST_MISSED)
        moments = latest.moments
        further = moments[_PER_TRANSACTION] if len(moments) > _PER_TRANSACTION else following
        return _Due(moments[:_PER_TRANSACTION], latest.dropped, further)
    found = cron.latest(before, now).moments
    if not found:
        return _Due([], 0, following)
    [last] = found
    if row.missed == Missed.SKIP and now - last > SKIPPED_AFTER:
        return _Due([], 1, following)
    return _Due([last], 0, following)


# ---------------------------------------------------------------------------------------------------------------------
# One extra message, and the leader's part.


def publish_now(
    run: Executor, catalog: TopicCatalog, producer_group: str, name: str, *, now: datetime | None = None
) -> UUID | None:
    """Publish one extra message of a schedule, with an id of its own, on an autocommit connection. Return its id.

    The due moments of the schedule do not change. A paused schedule stays paused. Returns None if there is no such
    schedule. Raises the errors of `append_decided`.
    """
    now = now or clock(run)
    with run.connection.transaction():
        row = lock_schedule(run, producer_group, name)
        if row is None:
            return None
        message = row.message(now, uuid7())
        _append(run, catalog, producer_group, [message])
        given = {"group": producer_group, "name": name, "next_at": row.next_at}
        run.execute(_MOVE, {**given, "last_at": None, "message_id": message.message_id})
    notify(run, Channel.DECIDED)
    return message.message_id


class Scheduling:
    """The leader's work on schedules: a look on the leader's own connection, and passes in a thread if one is due.

    A pass opens a connection, so that neither a lock nor an error of a schedule stops the ticks. Without due schedules,
    an idle leader opens no connection for them. `look` and `look_at` belong to the leader's thread. `look_at`: the time
    of the next look on the monotonic clock.
    """

    def __init__(self, database: BrokerDatabase) -> None:
        self._database = database
        self._catalog = TopicCatalog(database.schema)
        self._note = FailureNote(database, ProcessPart.LEADER_WORK, of="schedules")
        self.look_at = 0.0
        # The first pass waits for `wake`.
        self.loop = BackgroundLoop(
            "schedules",
            self._pass,
            every_seconds=LONGEST_WAIT_SECONDS,
            first_seconds=None,
            expected=(psycopg.Error, BrokerUnavailable),
        )

    def look(self, run: Executor, now: float) -> None:
        """Wake the thread if a schedule is due. `now`: the monotonic clock. Raises psycopg.Error."""
        is_due, wait_seconds = run.one(_LOOK)
        if is_due:
            self.loop.wake()
        self.look_at = now + (LONGEST_WAIT_SECONDS if wait_seconds is None else min(LONGEST_WAIT_SECONDS, wait_seconds))

    def _pass(self, stopping: Callable[[], bool]) -> float | None:
        with (
            self._note.watching(),
            contextlib.closing(self._database.open(name="outbox-schedules", direct=True)) as connection,
        ):
            wait = run_once(Executor(connection, self._database.schema), self._catalog).wait_seconds
        # The next look comes too late for what is due before it.
        return wait if wait < LONGEST_WAIT_SECONDS else None
