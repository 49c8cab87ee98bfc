"""A schedule: a declaration of a producer service, by which the leader publishes messages.

A service renews its declarations once a minute (`declare`). The name of a schedule is unique in its producer group. A
schedule is removed ten minutes after its last declaration.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Final
from uuid import UUID

from outbox.broker.database import arrays
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.contrib.schedules.cron import Cron
from outbox.errors import ConfigurationError, UsageError
from outbox.message import Message

NAME_HEADER: Final = "outbox-schedule"
TIME_HEADER: Final = "outbox-scheduled-for"

# A worker renews its declarations at this interval.
RENEW_SECONDS: Final = 60.0
# A schedule that a service no longer declares is removed after this time. During a deployment, processes of the old and
# of the new version declare different schedules, so a process must not remove a schedule at once.
KEEP_SECONDS: Final = 600.0
# During a deployment, processes of two versions may change a declaration in turn, once per RENEW_SECONDS. So a changed
# declaration is due again from this time before the change. Otherwise a due moment between two changes would be lost.
# The other passes of a process may delay its renewal, so the time is twice the interval.
LOOK_BACK_SECONDS: Final = 2 * RENEW_SECONDS


class Missed(enum.StrEnum):
    """What the leader publishes if several due moments have passed, or if a due moment has long passed."""

    COALESCE = "coalesce"
    """One message, for the latest due moment."""
    CATCH_UP = "catch_up"
    """One message for each due moment, but at most for the latest 1,000."""
    SKIP = "skip"
    """One message for the latest due moment, but no message if this moment is more than five minutes ago."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A declared schedule. `body` is encoded, because the leader has no codecs."""

    producer_group: str
    name: str
    expression: str
    timezone: str = "UTC"
    topic: str
    missed: str = Missed.COALESCE
    content_type: str = "application/json"
    body: bytes = b"{}"

    @property
    def cron(self) -> Cron:
        """The expression. Raises ConfigurationError if this machine cannot read expression or time zone."""
        return Cron(self.expression, self.timezone)

    def columns(self) -> dict[str, object]:
        """Return the values of the declaration, by the names of their columns."""
        return {one.name: getattr(self, one.name) for one in fields(Schedule)} | {"missed": str(self.missed)}

    def message(self, at: datetime, message_id: UUID | None = None) -> Message:
        """Return the message for a due moment. Without `message_id`, the id is computed from the due moment."""
        return Message(
            topic=self.topic,
            body=self.body,
            content_type=self.content_type,
            headers={NAME_HEADER: self.name, TIME_HEADER: at.isoformat()},
            message_id=message_id or id_of(self.producer_group, self.name, at),
        )


def id_of(producer_group: str, name: str, at: datetime) -> UUID:
    """Return the message id of a due moment: a UUIDv7 whose time is the due moment, and whose random bits are a hash.

    After a restore of the broker's database, the leader publishes a due moment with the same id again. So the inbox of
    a handler that has handled the message before skips it.
    """
    digest = hashlib.sha256(f"{producer_group}\n{name}\n{at.timestamp():.0f}".encode()).digest()
    milliseconds = round(at.timestamp() * 1000)
    high = milliseconds << 16 | 0x7000 | int.from_bytes(digest[:2]) & 0xFFF
    low = 0x8000_0000_0000_0000 | int.from_bytes(digest[2:10]) >> 2
    return UUID(int=high << 64 | low)


# ---------------------------------------------------------------------------------------------------------------------
# The rows of the table `schedule`.


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRow(Schedule):
    """A row of the table `schedule`.

    `last_at`: the due moment of the last message. `next_at`: the first due moment without a message. `error`: why the
    leader could not publish.
    """

    declared_at: datetime
    next_at: datetime
    last_at: datetime | None
    last_message_id: UUID | None
    paused_at: datetime | None
    error: str | None

    def upcoming(self, count: int) -> list[datetime]:
        """Return `next_at` and the due moments after it, in ascending order."""
        found = [self.next_at]
        # OverflowError: the year 9999 has no further moment.
        with suppress(ConfigurationError, OverflowError):
            found += islice(self.cron.after(self.next_at), count - 1)
        return found

    def late_seconds(self, now: datetime) -> float:
        """Return how long `next_at` is past. A paused schedule is not late."""
        return 0.0 if self.paused_at is not None else max(0.0, (now - self.next_at).total_seconds())

    def is_about_to_be_published(self, now: datetime) -> bool:
        """Whether a moment has just become due, so that the leader publishes its message in some seconds.

        A changed declaration waits for this message and takes effect a minute later. Otherwise this moment would have
        no message, because the new expression may not know it. If the leader does not publish it soon, the declaration
        changes all the same: perhaps the change mends the error.
        """
        late = now - self.next_at
        return self.paused_at is None and self.error is None and timedelta(0) <= late < timedelta(seconds=RENEW_SECONDS)


_NOW: Final = Statement("SELECT clock_timestamp()")
_COLUMNS: Final = ", ".join(one.name for one in fields(ScheduleRow))
_LIST: Final = Statement(f"""
SELECT {_COLUMNS} FROM {{schema}}.schedule
WHERE (%(group)s::text IS NULL OR producer_group = %(group)s) AND (%(name)s::text IS NULL OR name = %(name)s)
ORDER BY name, producer_group
""")
_LOCK: Final = Statement(f"""
SELECT {_COLUMNS} FROM {{schema}}.schedule WHERE producer_group = %(group)s AND name = %(name)s FOR UPDATE
""")


def clock(run: Executor) -> datetime:
    """Return the time of the broker's database."""
    [now] = run.one(_NOW)
    assert isinstance(now, datetime)
    return now


def list_schedules(run: Executor, *, producer_group: str | None = None, name: str | None = None) -> list[ScheduleRow]:
    """Return the schedules of one producer group or of all, by name."""
    return run.objects(ScheduleRow, _LIST, {"group": producer_group, "name": name})


def find_schedule(run: Executor, producer_group: str, name: str) -> ScheduleRow:
    """Return one schedule. Raises UsageError with the names of the existing schedules."""
    known = list_schedules(run, producer_group=producer_group)
    for one in known:
        if one.name == name:
            return one
    names = ", ".join(one.name for one in known) or "none"
    raise UsageError(
        f"producer group {producer_group!r} has no schedule {name!r} on the broker; its schedules are: {names}. A "
        f"worker of this service stores a new schedule within {RENEW_SECONDS:.0f} s."
    )


def lock_schedule(run: Executor, producer_group: str, name: str) -> ScheduleRow | None:
    """Lock a schedule until the transaction ends, and return it."""
    found = run.objects(ScheduleRow, _LOCK, {"group": producer_group, "name": name})
    return found[0] if found else None


# ---------------------------------------------------------------------------------------------------------------------
# Declaring.

_INSERT: Final = Statement("""
INSERT INTO {schema}.schedule (producer_group, name, expression, timezone, missed, topic, content_type, body,
                               declared_at, next_at)
VALUES (%(producer_group)s, %(name)s, %(expression)s, %(timezone)s, %(missed)s, %(topic)s, %(content_type)s, %(body)s,
        %(now)s, %(next_at)s)
ON CONFLICT (producer_group, name) DO NOTHING
""")
_CHANGE: Final = Statement("""
UPDATE {schema}.schedule
SET expression = %(expression)s, timezone = %(timezone)s, missed = %(missed)s, topic = %(topic)s,
    content_type = %(content_type)s, body = %(body)s, declared_at = %(now)s, next_at = %(next_at)s, error = NULL
WHERE producer_group = %(producer_group)s AND name = %(name)s
""")
_RENEW: Final = Statement("""
UPDATE {schema}.schedule SET declared_at = %(now)s
WHERE producer_group = %(group)s AND name = ANY (%(names)s::text[])
  AND declared_at < %(now)s::timestamptz - make_interval(secs => %(renew)s)
""")
_REMOVE: Final = Statement("""
DELETE FROM {schema}.schedule
WHERE producer_group = %(group)s AND name <> ALL (%(names)s::text[])
  AND declared_at < %(now)s::timestamptz - make_interval(secs => %(keep)s)
""")


@dataclass(frozen=True, slots=True)
class DeclareCounts:
    """The numbers of schedules that a call of `declare` has added, changed and removed."""

    added: int = 0
    changed: int = 0
    removed: int = 0


def declare(
    run: Executor, producer_group: str, wanted: Sequence[Schedule], *, now: datetime | None = None
) -> DeclareCounts:
    """Store the schedules that a process of the service declares, on an autocommit connection.

    A new schedule is due for the first time after now. Schedules that no process of the service has declared for
    `KEEP_SECONDS` are removed. The call writes only if a schedule is new, changed, or not renewed for half of
    `RENEW_SECONDS`.
    """
    now = now or clock(run)
    known = {one.name: one for one in list_schedules(run, producer_group=producer_group)}
    added = changed = 0
    for one in sorted(wanted, key=lambda one: one.name):
        row = known.get(one.name)
        if row is None:
            added += run.count(_INSERT, {**one.columns(), "now": now, "next_at": one.cron.next(now)})
        elif row.columns() != one.columns():
            changed += _change(run, one, now)
    names = {"group": producer_group, "names": arrays.texts([one.name for one in wanted]), "now": now}
    if any(row.declared_at < now - timedelta(seconds=RENEW_SECONDS / 2) for row in known.values()):
        run.execute(_RENEW, {**names, "renew": RENEW_SECONDS / 2})
    removed = run.count(_REMOVE, {**names, "keep": KEEP_SECONDS}) if set(known) - {one.name for one in wanted} else 0
    return DeclareCounts(added, changed, removed)


def _change(run: Executor, one: Schedule, now: datetime) -> int:
    with run.connection.transaction():
        row = lock_schedule(run, one.producer_group, one.name)
        if row is None or row.columns() == one.columns() or row.is_about_to_be_published(now):
            return 0
        next_at: datetime | None = row.next_at
        if (row.expression, row.timezone) != (one.expression, one.timezone):
            begin = now - timedelta(seconds=LOOK_BACK_SECONDS)
            next_at = one.cron.next(max(begin, row.last_at) if row.last_at else begin)
        return run.count(_CHANGE, {**one.columns(), "now": now, "next_at": next_at})


# ---------------------------------------------------------------------------------------------------------------------
# Pausing.

_PAUSE: Final = Statement("""
UPDATE {schema}.schedule SET paused_at = CASE WHEN %(paused)s THEN coalesce(paused_at, clock_timestamp()) END
WHERE producer_group = %(group)s AND name = %(name)s
""")


def pause(run: Executor, producer_group: str, name: str, *, paused: bool) -> None:
    """Pause a schedule, or resume it. After a resumption, the due moments of the pause are missed due moments."""
    run.execute(_PAUSE, {"group": producer_group, "name": name, "paused": paused})


# ---------------------------------------------------------------------------------------------------------------------
# Erasing.

# The error is about a declaration, so it is erased only if it contains one of the texts. The type of the error stays.
_ERASE: Final = Statement("""
UPDATE {schema}.schedule
SET error = coalesce(substring(error FROM '^[A-Za-z_][A-Za-z0-9_]*:') || ' ', '') || '(erased)'
WHERE right(error, 8) <> '(erased)' AND error LIKE ANY(%(patterns)s::text[])
""")


def erase_errors(run: Executor, values: Mapping[str, Any]) -> int:
    """Erase the errors that contain one of the texts. Return their number."""
    return run.count(_ERASE, values)
