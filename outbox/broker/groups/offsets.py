"""Consumer offsets are rows of an append-only table.

For each group and queue, only the row with the greatest (epoch, ordinal) counts.

No statement updates a row, and the newest row is read first, so consumers do not read the rows that retention removed
while a reader holds a snapshot. A row has the position of the group (`next_offset`), and counts the outcomes of all
entries before that position. This equation is true for every row:

    next_offset - start_offset = handled + filtered + skipped + sent_back + dead + expired + moved

`moved` counts the entries that an offset reset skipped, minus the entries that a reset made the group read again. A
former owner may still append rows under its old epoch, but such a row never becomes the position of the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, LiteralString
from uuid import UUID

from outbox.broker.database import arrays
from outbox.broker.database.arrays import BIGINTS, INTEGERS
from outbox.broker.database.executor import Executor
from outbox.broker.database.sender import all_rows
from outbox.broker.database.statement import BIGINT, INTEGER, UUID_, Statement
from outbox.broker.groups.leases import QueueKey


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a group on a queue, and the outcomes of the queue's entries since `start_offset`."""

    next_offset: int
    start_offset: int
    handled: int = 0
    filtered: int = 0
    skipped: int = 0
    sent_back: int = 0
    dead: int = 0
    expired: int = 0
    moved: int = 0


@dataclass(frozen=True, slots=True)
class OffsetRow:
    """A position that is to be stored under a lease."""

    key: QueueKey
    epoch: int
    ordinal: int
    position: Position


def newest_offset(group_id: LiteralString, queue_id: LiteralString, *, only: LiteralString = "") -> LiteralString:
    """Return SQL (for LATERAL) that selects the stored row that counts for a group and a queue.

    All are SQL expressions. If the condition `only` is false, PostgreSQL does not read the row.
    """
    return (
        "(SELECT stored.* FROM {schema}.consumer_offset stored WHERE stored.group_id = "
        + group_id
        + " AND stored.queue_id = "
        + queue_id
        + (" AND " + only if only else "")
        + " ORDER BY stored.epoch DESC, stored.ordinal DESC LIMIT 1)"
    )


_POSITIONS = Statement("""
SELECT next_offset, moved FROM {schema}.consumer_offset WHERE group_id = %(group_id)s AND queue_id = %(queue_id)s
ORDER BY epoch DESC, ordinal DESC
""")


def positions(run: Executor, group_id: int, queue_id: int) -> list[tuple[int, int]]:
    """Return `next_offset` and `moved` of all stored rows of a group and a queue, the row that counts first."""
    return [(row[0], row[1]) for row in run.rows(_POSITIONS, {"group_id": group_id, "queue_id": queue_id})]


_LOAD = Statement(f"""
SELECT wanted.queue_id, coalesce(newest.next_offset, 0), coalesce(newest.start_offset, 0),
       coalesce(newest.handled, 0), coalesce(newest.filtered, 0), coalesce(newest.skipped, 0),
       coalesce(newest.sent_back, 0), coalesce(newest.dead, 0), coalesce(newest.expired, 0), coalesce(newest.moved, 0)
FROM unnest(%(queue_ids)s::integer[]) AS wanted (queue_id)
LEFT JOIN LATERAL {newest_offset("%(group_id)s", "wanted.queue_id")} AS newest ON true""")


def load(run: Executor, group_id: int, queue_ids: Sequence[int]) -> dict[int, Position]:
    """Return the positions by queue id. A queue without a row is newer than the group, and its position is 0."""
    rows = run.rows(_LOAD, {"group_id": group_id, "queue_ids": arrays.integers(queue_ids)})
    # The columns after the queue id have the names and the order of the fields of Position.
    return {queue_id: Position(*position) for queue_id, *position in rows}


_INSERT = """
INSERT INTO {schema}.consumer_offset
    (group_id, queue_id, epoch, ordinal, next_offset, start_offset, handled, filtered, skipped, sent_back, dead,
     expired, moved)
"""
_GIVEN = """
    unnest(
        %(group_ids)s::integer[], %(queue_ids)s::integer[], %(epochs)s::bigint[], %(ordinals)s::bigint[],
        %(next_offset)s::bigint[], %(start_offset)s::bigint[], %(handled)s::bigint[], %(filtered)s::bigint[],
        %(skipped)s::bigint[], %(sent_back)s::bigint[], %(dead)s::bigint[], %(expired)s::bigint[], %(moved)s::bigint[]
    ) AS given (group_id, queue_id, epoch, ordinal, next_offset, start_offset, handled, filtered, skipped, sent_back,
                dead, expired, moved)
"""
_GIVEN_ONE = """
    (VALUES (
        %(group_id)s::integer, %(queue_id)s::integer, %(epoch)s::bigint, %(ordinal)s::bigint, %(next_offset)s::bigint,
        %(start_offset)s::bigint, %(handled)s::bigint, %(filtered)s::bigint, %(skipped)s::bigint, %(sent_back)s::bigint,
        %(dead)s::bigint, %(expired)s::bigint, %(moved)s::bigint
    )) AS given (group_id, queue_id, epoch, ordinal, next_offset, start_offset, handled, filtered, skipped, sent_back,
                 dead, expired, moved)
"""
_COLUMNS = ("next_offset", "start_offset", "handled", "filtered", "skipped", "sent_back", "dead", "expired", "moved")
_counts: Final = attrgetter(*_COLUMNS)
_BIGINTS_OF: Final = ("epochs", "ordinals", *_COLUMNS)
_BIGINTS_OF_ONE: Final = ("epoch", "ordinal", *_COLUMNS)
_TYPES: Final = {**dict.fromkeys(("group_ids", "queue_ids"), INTEGERS), **dict.fromkeys(_BIGINTS_OF, BIGINTS)}

# If a crash of the server loses the newest offsets, some handled messages are delivered again, as after a crash of the
# consumer. The crash loses no other data of this transaction, so the commit does not wait for the disk. set_config(…,
# true) changes the setting only until the end of the transaction.
_RELAXED = (
    "WITH relaxed AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))"
    + _INSERT
    + "SELECT given.* FROM relaxed, "
)
_OF_HOLDER = """
JOIN {schema}.queue_lease held
  ON held.group_id = given.group_id AND held.queue_id = given.queue_id AND held.epoch = given.epoch
 AND held.owner = %(owner)s
ORDER BY given.group_id, given.queue_id
RETURNING group_id, queue_id
"""
_STORE = Statement(_RELAXED + _GIVEN + _OF_HOLDER, {**_TYPES, "owner": UUID_}, (INTEGER, INTEGER))
# The values of one row cost less as numbers than as arrays of one number each.
_STORE_ONE = Statement(
    _RELAXED + _GIVEN_ONE + _OF_HOLDER,
    {**dict.fromkeys(("group_id", "queue_id"), INTEGER), **dict.fromkeys(_BIGINTS_OF_ONE, BIGINT), "owner": UUID_},
    (INTEGER, INTEGER),
)
_PLACE = Statement(_INSERT + "SELECT given.* FROM " + _GIVEN, _TYPES)


def store(run: Executor, owner: UUID, rows: Sequence[OffsetRow]) -> set[QueueKey]:
    """Store positions in one statement. Return the keys of the leases that this owner still holds.

    Every call needs new ordinals, because the rows of an earlier call may be stored although its answer was lost.
    """
    # The sender takes a third of the CPU of a cursor, which would find out the types of 14 values at each call.
    if len(rows) == 1:
        row = rows[0]
        return set(all_rows(run, _STORE_ONE, (*row.key, row.epoch, row.ordinal, *_counts(row.position), owner)))
    return set(all_rows(run, _STORE, (*_columns(rows), owner)))


def place(run: Executor, rows: Sequence[OffsetRow]) -> None:
    """Store positions without a check of the owner, under epochs that the caller has just raised."""
    if rows:
        all_rows(run, _PLACE, _columns(rows))


_STORE_STARTS = Statement("""
INSERT INTO {schema}.consumer_offset (group_id, queue_id, epoch, ordinal, next_offset, start_offset)
SELECT %(group_id)s, queue_id, 0, 0, start, start
FROM unnest(%(queue_ids)s::integer[], %(starts)s::bigint[]) AS given (queue_id, start)
ON CONFLICT DO NOTHING
""")


def store_starts(run: Executor, group_id: int, starts: Mapping[int, int]) -> None:
    """Store start offsets of a group. If the group already has a position on a queue, that position stays unchanged."""
    queue_ids, offsets = arrays.integers(list(starts)), arrays.bigints(list(starts.values()))
    run.execute(_STORE_STARTS, {"group_id": group_id, "queue_ids": queue_ids, "starts": offsets})


def _columns(rows: Sequence[OffsetRow]) -> list[tuple[int, ...]]:
    """Return the values of each column of `_GIVEN`, in their order."""
    return list(zip(*[(*row.key, row.epoch, row.ordinal, *_counts(row.position)) for row in rows], strict=True))
