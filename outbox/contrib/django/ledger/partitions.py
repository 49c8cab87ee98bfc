"""The partitions of the inbox (table outbox_inbox), on PostgreSQL: their layout, how they are made, and when they go.

Partitions follow `message_id`. Ids of UUID version 7 contain a time, so their rows go to the partition of this time.
Ids of other versions (received events, repairs) are spread over the whole range of ids. The partitions cover the whole
range at each moment, so each row has a partition:

    before │ rest …    │ time   time   time │ time   time … (two weeks) │ ahead      │ after
    ───────┴───────────┴────────────────────┴───────────────────────────┴────────────┴──────
           rows that stayed                 now                                      2100

- A *time partition* is dropped whole, when no message of its rows can be delivered again. A few rows that must stay
  move into the neighbour before it, which then covers the range of the dropped partition, too.
- From all other partitions, the pruning pass deletes single rows, as from an inbox without partitions.
- A new time partition takes its range from the beginning of `ahead`.

Each step is one transaction, so a killed process leaves either the layout before the step or the layout after it. A
step waits for its lock only for a short time: handlers wait behind it. If it does not get the lock, the next pass tries
again.

Partitions are an explicit step: removing a million rows takes 0.1 s instead of 8 s and leaves nothing to vacuum, but
the statements of a message use 6 % more CPU, and pruning by DELETE keeps up with 20,000 rows/s. The ledger has none: it
keeps rows for an hour. The log has none: its unique ids would need a table of their own, with 43 % more CPU per
message. `python -m benchmarks.partitions` measures both ways.

There is no DEFAULT partition, because PostgreSQL reads it whenever a partition is made, and no DETACH CONCURRENTLY,
because ids of the detached range would have no partition meanwhile. The pass reads which ids the log has before it
takes its lock: a message that is delivered later was in the log at that time.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.db.utils import OperationalError
from psycopg import sql

from outbox.contrib.django.ledger.ledger import without_timeouts
from outbox.errors import UsageError
from outbox.utils.faults import point

logger = logging.getLogger(__name__)

TABLE: Final = "outbox_inbox"
# Names of partitions. The pass recognises the kind of a partition by its name.
_TIME: Final = f"{TABLE}_time_"
_FORMER: Final = f"{TABLE}_time_former"
_REST: Final = f"{TABLE}_rest_"
_BEFORE: Final = f"{_REST}before"
_AHEAD: Final = f"{_REST}ahead"
_AFTER: Final = f"{_REST}after"

# Ids of UUID version 7 have times between these two.
_EARLIEST: Final = datetime(2000, 1, 1, tzinfo=UTC)
_LATEST: Final = datetime(2100, 1, 1, tzinfo=UTC)

# Partitions that one INBOX_RETENTION_SECONDS is divided into, and partitions that are made ahead.
PER_RETENTION: Final = 14
_AHEAD_COUNT: Final = 14
# One step moves at most this number of rows, and reads at most this number of bytes of a neighbour. Handlers wait for
# the step meanwhile.
_MOST_ROWS: Final = 20_000
_MOST_BYTES: Final = 64 * 1024 * 1024
# Handlers wait behind a step that waits for their transactions, so the step does not wait for long.
_LOCK_MILLISECONDS: Final = 200
_ATTEMPTS: Final = 3
_LOCK_NOT_AVAILABLE: Final = "55P03"

# The rows of a time partition are written once and dropped together: the first vacuum also freezes them, so that no
# later vacuum reads them again.
_TIME_OPTIONS: Final = "WITH (autovacuum_freeze_min_age = 0)"
_REST_OPTIONS: Final = "WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 10000)"


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition with the ids from `first` up to `stop` (exclusive). None is the end of the range of all ids."""

    name: str
    first: UUID | None
    stop: UUID | None

    @property
    def is_dropped_whole(self) -> bool:
        """Whether the partition goes as a whole. From the others, pruning deletes rows."""
        return self.name.startswith(_TIME)


def bound(moment: datetime) -> UUID:
    """Return the smallest id of a time."""
    return UUID(int=int(moment.timestamp() * 1000) << 80)


def _moment(value: UUID) -> datetime:
    return datetime.fromtimestamp((value.int >> 80) / 1000, UTC)


_LIST: Final = f"""
SELECT child.relname::text, pg_get_expr(child.relpartbound, child.oid)
FROM pg_inherits JOIN pg_class child ON child.oid = inhrelid
WHERE inhparent = to_regclass('{TABLE}') AND child.relispartition
"""
_BOUNDS: Final = re.compile(r"FOR VALUES FROM \((?:MINVALUE|'(.+)')\) TO \((?:MAXVALUE|'(.+)')\)")


def list_partitions(connection: BaseDatabaseWrapper) -> list[Partition]:
    """Return the partitions of the inbox in the order of their ids; an empty list if the inbox has no partitions."""
    if connection.vendor != "postgresql":
        return []
    with connection.cursor() as cursor:
        return _list(cursor)


def _list(cursor: CursorWrapper) -> list[Partition]:
    cursor.execute(_LIST)
    found = [(name, _BOUNDS.fullmatch(text)) for name, text in cursor.fetchall()]
    parts = [Partition(name, _id(match[1]), _id(match[2])) for name, match in found if match]
    return sorted(parts, key=lambda one: one.first.int if one.first else -1)


def _id(text: str | None) -> UUID | None:
    return None if text is None else UUID(text)


def tables_with_single_rows(parts: Sequence[Partition]) -> list[str]:
    """Return the tables from which pruning deletes single rows."""
    return [one.name for one in parts if not one.is_dropped_whole] if parts else [TABLE]


# -- statements --------------------------------------------------------------------------------------


def _execute(cursor: CursorWrapper, statement: str, values: Any = None, **names: str | UUID | None) -> None:
    """Execute a statement with names of tables, and with bounds, which PostgreSQL takes only as literals."""
    given: dict[str, sql.Composable] = {
        name: sql.Identifier(value) if isinstance(value, str) else _bound_literal(name, value)
        for name, value in names.items()
    }
    composed: Any = sql.SQL(statement).format(**given)
    cursor.execute(composed, values)


def _bound_literal(name: str, value: UUID | None) -> sql.Composable:
    if value is None:
        return sql.SQL("MINVALUE" if name == "first" else "MAXVALUE")
    return sql.Literal(str(value))


_MAKE: Final = f"CREATE TABLE {{name}} PARTITION OF {TABLE} FOR VALUES FROM ({{first}}) TO ({{stop}}) "
_ATTACH: Final = f"ALTER TABLE {TABLE} ATTACH PARTITION {{name}} FOR VALUES FROM ({{first}}) TO ({{stop}})"
_DETACH: Final = f"ALTER TABLE {TABLE} DETACH PARTITION {{name}}"


def _make_time(cursor: CursorWrapper, first: UUID, stop: UUID) -> None:
    name = f"{_TIME}{_moment(first):%Y%m%d_%H%M%S}"
    _execute(cursor, _MAKE + _TIME_OPTIONS, name=name, first=first, stop=stop)
    # The index answers whether a row of the partition is young. Rows are only appended, so it stays small.
    _execute(cursor, "CREATE INDEX {index} ON {name} USING brin (handled_at)", index=_index(name), name=name)


def _make_rest(cursor: CursorWrapper, name: str, first: UUID | None, stop: UUID | None) -> None:
    _execute(cursor, _MAKE + _REST_OPTIONS, name=name, first=first, stop=stop)
    # Pruning reads these rows in the order of time.
    _execute(cursor, "CREATE INDEX {index} ON {name} (handled_at)", index=_index(name), name=name)


def _index(name: str) -> str:
    return f"{name}_handled_at"


@contextmanager
def _locked(connection: BaseDatabaseWrapper) -> Iterator[CursorWrapper]:
    """Open a transaction that no handler's transaction overlaps.

    Raises OperationalError (lock_timeout) if the running handlers do not end soon enough.
    """
    with without_timeouts(connection, lock_timeout_milliseconds=_LOCK_MILLISECONDS), connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE ONLY {TABLE} IN ACCESS EXCLUSIVE MODE")
        # Without statistics, the planner would read whole partitions instead of their indexes.
        cursor.execute("SET LOCAL enable_seqscan = off")
        yield cursor


def _tried(step: Callable[[], bool]) -> bool:
    """Call a step until it gets its locks. Return False if it does not get them, or had nothing to do."""
    for _ in range(_ATTEMPTS):
        try:
            return step()
        except OperationalError as error:
            if getattr(error.__cause__, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
                raise
            time.sleep(_LOCK_MILLISECONDS / 1000)
    logger.info("a step on the partitions of %s did not get its locks; the next pass tries again", TABLE)
    return False


# -- making partitions ahead -------------------------------------------------------------------------


def make_ahead(connection: BaseDatabaseWrapper, *, now: datetime, width: timedelta) -> int:
    """Make time partitions of `width` until two weeks (14 widths) ahead. Return the number of new partitions.

    If no pass has run for long, rows of the present are in the partition `ahead`. A few of them move. If there are
    many, the function makes nothing and logs a warning: pruning then deletes the rows of `ahead` one by one.
    """
    ahead = _find(list_partitions(connection), _AHEAD)
    if ahead is None or ahead.first is None:
        return 0
    bounds = _bounds_ahead(_moment(ahead.first), now, width)
    if len(bounds) < 2:
        return 0
    if _is_more(connection, "SELECT FROM {name} WHERE message_id < %s", [bounds[-1]], _AHEAD):
        logger.warning(
            "the partition %s has more than %s rows before %s, so no time partition was made. No row is lost: pruning "
            "deletes the rows of this partition one by one. A producer with a wrong clock, or passes that did not run "
            "for two weeks, may be the cause (docs/operations/space.md).",
            *(_AHEAD, _MOST_ROWS, _moment(bounds[-1])),
        )
        return 0
    return (len(bounds) - 1) * _tried(lambda: _make_ahead(connection, ahead, bounds))


def _bounds_ahead(start: datetime, now: datetime, width: timedelta) -> list[UUID]:
    """The bounds of the partitions to make: `start`, and the ends of the partitions."""
    if start >= now + width * (_AHEAD_COUNT - 1):
        return []
    bounds = [start]
    if start < now:
        # One partition for all of the time in which no pass ran.
        bounds.append(now + width)
    while bounds[-1] < now + width * _AHEAD_COUNT:
        bounds.append(bounds[-1] + width)
    return [bound(one) for one in bounds]


def _make_ahead(connection: BaseDatabaseWrapper, ahead: Partition, bounds: Sequence[UUID]) -> bool:
    with _locked(connection) as cursor:
        if ahead not in _list(cursor):
            return False  # Another pass was faster.
        _execute(cursor, _DETACH, name=_AHEAD)
        for first, stop in pairwise(bounds):
            _make_time(cursor, first, stop)
        point("partition.in_make")
        _execute(cursor, f"WITH moved AS (DELETE FROM {{name}} WHERE message_id < %s RETURNING {_COLUMNS}) {_INTO_ALL}",
                 [bounds[-1]], name=_AHEAD)  # fmt: skip
        _execute(cursor, _ATTACH, name=_AHEAD, first=bounds[-1], stop=ahead.stop)
        point("partition.before_make")
    point("partition.after_make")
    return True


_COLUMNS: Final = "consumer_group, generation, message_id, handled_at"
_INTO_ALL: Final = f"INSERT INTO {TABLE} ({_COLUMNS}) SELECT {_COLUMNS} FROM moved"


def _find(parts: Sequence[Partition], name: str) -> Partition | None:
    return next((one for one in parts if one.name == name), None)


def _is_more(connection: BaseDatabaseWrapper, rows: str, values: Sequence[Any], name: str) -> bool:
    """Whether a partition has more of these rows than a step may move."""
    with connection.cursor() as cursor:
        statement = f"SELECT count(*) > {_MOST_ROWS} FROM ({rows} LIMIT {_MOST_ROWS + 1}) AS found"
        _execute(cursor, statement, values, name=name)
        return bool(cursor.fetchone()[0])


# -- dropping partitions -----------------------------------------------------------------------------

# Return the ids of messages from the first id up to the second one that can be delivered again, at most as many as the
# number says.
Deliverable = Callable[[UUID, UUID, int], Sequence[UUID]]


@dataclass(frozen=True, slots=True)
class Dropped:
    """`partitions`: the number of dropped partitions. `waiting`: the first partition that should go and has not gone
    because of a lock.

    `more`: the time was over before all partitions were examined.
    """

    partitions: int = 0
    waiting: Partition | None = None
    more: bool = False


def drop_old(
    connection: BaseDatabaseWrapper, deliverable: Deliverable, *, older_than: datetime, ends: float
) -> Dropped:
    """Drop the time partitions that have no row of a message that can be delivered again, until the time `ends`.

    A partition is examined if all times of its ids are before `older_than`. Some rows of such a partition must stay:
    the rows that were handled after `older_than` (a message that was delayed), and the rows of messages that can be
    delivered again (retries, dead letters, groups that are behind). If there are few, they move, and the partition
    goes. If there are many, the partition stays until the next pass.
    """
    dropped = 0
    for one in list_partitions(connection):
        if not one.is_dropped_whole or one.stop is None or one.first is None or one.stop > bound(older_than):
            continue
        if time.monotonic() >= ends:
            return Dropped(dropped, more=True)
        # A message that is delivered from now on was in the log before: so its id is in this list.
        kept = deliverable(one.first, one.stop, _MOST_ROWS + 1)
        _summarize(connection, one.name)
        point("partition.before_drop")
        if len(kept) > _MOST_ROWS or _has_many_young(connection, one, older_than):
            continue
        if not _tried(lambda one=one, kept=kept: _drop(connection, one, kept, older_than)):  # type: ignore[misc]
            return Dropped(dropped, waiting=one)
        dropped += 1
    return Dropped(dropped)


def _summarize(connection: BaseDatabaseWrapper, name: str) -> None:
    """Bring the index of times up to date, so that the look at young rows reads little."""
    if name != _FORMER:
        with connection.cursor() as cursor:
            cursor.execute("SELECT brin_summarize_new_values(to_regclass(quote_ident(%s)))", [_index(name)])


def _has_many_young(connection: BaseDatabaseWrapper, part: Partition, older_than: datetime) -> bool:
    with without_timeouts(connection), connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        return _is_more(connection, "SELECT FROM {name} WHERE handled_at >= %s", [older_than], part.name)


# The rows that must stay. The groups of the partition are few, so each row is found by its primary key. OFFSET 0 keeps
# the planner from reading the whole partition.
_KEEP: Final = f"""
WITH RECURSIVE known AS (
    (SELECT consumer_group, generation FROM {{name}} ORDER BY 1, 2 LIMIT 1)
    UNION ALL
    SELECT following.consumer_group, following.generation
    FROM known CROSS JOIN LATERAL (
        SELECT part.consumer_group, part.generation FROM {{name}} part
        WHERE (part.consumer_group, part.generation) > (known.consumer_group, known.generation)
        ORDER BY 1, 2 LIMIT 1) AS following
), moved AS (
    SELECT kept.*
    FROM known CROSS JOIN unnest(%s::uuid[]) AS given (message_id)
    CROSS JOIN LATERAL (
        SELECT {_COLUMNS} FROM {{name}} part
        WHERE part.consumer_group = known.consumer_group AND part.generation = known.generation
          AND part.message_id = given.message_id OFFSET 0) AS kept
    UNION
    SELECT {_COLUMNS} FROM {{name}} WHERE handled_at >= %s
)
INSERT INTO {{target}} ({_COLUMNS}) SELECT {_COLUMNS} FROM moved
"""


def _drop(connection: BaseDatabaseWrapper, part: Partition, kept: Sequence[UUID], older_than: datetime) -> bool:
    with _locked(connection) as cursor:
        parts = _list(cursor)
        if part not in parts:
            return True  # Another pass was faster.
        neighbour = parts[parts.index(part) - 1] if parts.index(part) else None
        if neighbour is not None and (neighbour.is_dropped_whole or _bytes(cursor, neighbour.name) > _MOST_BYTES):
            neighbour = None
        _execute(cursor, _DETACH, name=part.name)
        point("partition.in_drop")
        if neighbour is None:
            target = part.name.replace(_TIME, _REST)
            _make_rest(cursor, target, part.first, part.stop)
        else:
            target = neighbour.name
            _execute(cursor, _DETACH, name=target)
        _execute(cursor, _KEEP, [list(kept), older_than], name=part.name, target=target)
        _execute(cursor, "DROP TABLE {name}", name=part.name)
        if neighbour is not None:
            _execute(cursor, _ATTACH, name=target, first=neighbour.first, stop=part.stop)
        point("partition.before_drop_commit")
    point("partition.after_drop")
    return True


def _bytes(cursor: CursorWrapper, name: str) -> int:
    cursor.execute("SELECT pg_table_size(quote_ident(%s)::regclass)", [name])
    return int(cursor.fetchone()[0])


# -- conversion --------------------------------------------------------------------------------------

_STATE: Final = f"""
SELECT relkind::text, greatest(reltuples, 0)::bigint, pg_table_size(pg_class.oid),
       pg_has_role(relowner, 'USAGE'), relowner::regrole::text
FROM pg_class WHERE oid = to_regclass('{TABLE}')
"""
# Objects that would stay with the former table.
_OBSTACLES: Final = f"""
SELECT DISTINCT 'the view ' || view.oid::regclass::text
FROM pg_depend JOIN pg_rewrite ON pg_rewrite.oid = objid JOIN pg_class view ON view.oid = ev_class
WHERE classid = 'pg_rewrite'::regclass AND refobjid = '{TABLE}'::regclass AND view.oid <> refobjid
UNION ALL
SELECT 'the trigger ' || tgname FROM pg_trigger WHERE tgrelid = '{TABLE}'::regclass AND NOT tgisinternal
UNION ALL
SELECT 'the publication ' || pubname FROM pg_publication_rel JOIN pg_publication ON pg_publication.oid = prpubid
WHERE prrelid = '{TABLE}'::regclass
ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class Conversion:
    """The state of an inbox before its conversion: whether it has partitions, about how many rows, how many bytes."""

    is_partitioned: bool
    rows: int
    bytes: int


def plan_conversion(connection: BaseDatabaseWrapper) -> Conversion:
    """Return the state of the inbox. Raises UsageError if the inbox cannot be converted."""
    if connection.vendor != "postgresql":
        raise UsageError(f"{connection.alias!r} is not PostgreSQL, so its inbox cannot have partitions.")
    with connection.cursor() as cursor:
        cursor.execute(_STATE)
        found = cursor.fetchone()
        if found is None:
            raise UsageError(f"{TABLE} is missing on {connection.alias!r}: run `manage.py migrate` first.")
        kind, rows, size, is_owner, owner = found
        if kind == "p":
            return Conversion(True, 0, 0)
        if not is_owner:
            raise UsageError(
                f"{TABLE} on {connection.alias!r} belongs to role {owner}, and only its owner can change it: run this "
                "command as that role. Nothing was changed."
            )
        cursor.execute(_OBSTACLES)
        obstacles = [name for (name,) in cursor.fetchall()]
        if obstacles:
            raise UsageError(
                f"{', '.join(obstacles)} would stay with the former table of {TABLE} on {connection.alias!r}: remove "
                "them, run this command, and make them again. Nothing was changed."
            )
        return Conversion(False, rows, size)


def convert(connection: BaseDatabaseWrapper, *, now: datetime, width: timedelta, patience_seconds: float) -> bool:
    """Put the inbox into partitions, in one transaction. Return False if it has partitions already.

    The rows stay in their table, which becomes one partition and goes as a whole later. Handlers wait while PostgreSQL
    reads this table. Publishing does not wait. Raises UsageError if the inbox cannot be converted, or if its lock was
    not free within `patience_seconds`.
    """
    if plan_conversion(connection).is_partitioned:
        return False
    ends = time.monotonic() + patience_seconds
    while True:
        try:
            _convert(connection, now, width)
            return True
        except OperationalError as error:
            if getattr(error.__cause__, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
                raise
            if time.monotonic() >= ends:
                raise UsageError(
                    f"{TABLE} on {connection.alias!r} was in use for {patience_seconds:.0f} s: transactions of "
                    "handlers overlap all the time, or one of them is open for long. Nothing was changed. Run this "
                    "command again with more --patience, or stop the workers for the time of the command."
                ) from error
            time.sleep(_LOCK_MILLISECONDS / 1000)


# The columns, the owner and the rights of the new table are those of the former one.
_CREATE: Final = (
    f"CREATE TABLE {TABLE} (LIKE {{former}} INCLUDING DEFAULTS, PRIMARY KEY (consumer_group, generation, message_id)) "
    "PARTITION BY RANGE (message_id)"
)
_OWN: Final = f"""
DO $$
DECLARE
    one record;
BEGIN
    EXECUTE (SELECT 'ALTER TABLE {TABLE} OWNER TO ' || relowner::regrole FROM pg_class
             WHERE oid = '{_FORMER}'::regclass);
    FOR one IN SELECT grantee, privilege_type, is_grantable, relowner FROM pg_class, aclexplode(relacl)
               WHERE oid = '{_FORMER}'::regclass AND grantee <> relowner LOOP
        EXECUTE format('GRANT %s ON {TABLE} TO %s%s', one.privilege_type,
                       CASE one.grantee WHEN 0 THEN 'PUBLIC' ELSE one.grantee::regrole::text END,
                       CASE WHEN one.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END);
    END LOOP;
END $$
"""
_PRIMARY_KEY: Final = f"SELECT conname FROM pg_constraint WHERE conrelid = '{_FORMER}'::regclass AND contype = 'p'"


def _convert(connection: BaseDatabaseWrapper, now: datetime, width: timedelta) -> None:
    earliest, start, latest = bound(_EARLIEST), bound(now), bound(_LATEST)
    with _locked(connection) as cursor:
        # The step reads all rows, which is faster without the index.
        cursor.execute("SET LOCAL enable_seqscan = on")
        _execute(cursor, f"ALTER TABLE {TABLE} RENAME TO {{former}}", former=_FORMER)
        cursor.execute(_PRIMARY_KEY)
        [key] = cursor.fetchone()
        _execute(cursor, "ALTER TABLE {former} RENAME CONSTRAINT {key} TO {name}",
                 former=_FORMER, key=key, name=f"{_FORMER}_pkey")  # fmt: skip
        _execute(cursor, "ALTER INDEX IF EXISTS {index} RENAME TO {name}",
                 index=f"{TABLE}_handled_at", name=_index(_FORMER))  # fmt: skip
        _execute(cursor, _CREATE, former=_FORMER)
        cursor.execute(_OWN)
        _make_rest(cursor, _BEFORE, None, earliest)
        bounds = [start, *_bounds_ahead(_moment(start) + width, now, width)]
        for first, stop in pairwise(bounds):
            _make_time(cursor, first, stop)
        _make_rest(cursor, _AHEAD, bounds[-1], latest)
        _make_rest(cursor, _AFTER, latest, None)
        point("partition.in_convert")
        # Ids of other versions, and ids of producers with a clock that is ahead.
        _execute(cursor, f"WITH moved AS (DELETE FROM {{name}} WHERE message_id < %s OR message_id >= %s RETURNING "
                 f"{_COLUMNS}) {_INTO_ALL}", [earliest, start], name=_FORMER)  # fmt: skip
        _execute(cursor, _ATTACH, name=_FORMER, first=earliest, stop=start)
        point("partition.before_convert")
