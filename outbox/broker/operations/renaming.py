"""Rename a consumer group. All broker rows of a group refer to its id, so only two names change.

The inbox rows are in the databases of the application; they are copied between the two steps here. Until the second
step the old name is valid, and the new name belongs to a paused, empty group.
"""

from __future__ import annotations

from dataclasses import dataclass

from outbox import names
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Channel, notify
from outbox.broker.database.statement import Statement
from outbox.broker.groups.registration import unknown_group
from outbox.broker.operations.deletion import delete_group, refuse_live
from outbox.errors import UsageError


@dataclass(frozen=True, slots=True)
class Reserved:
    """A rename that has begun. A consumer of the group would raise an epoch, so `epochs` would differ then."""

    epochs: str


# Both at once, in one order.
_LOCK = Statement("""
SELECT name, group_id FROM {schema}.consumer_group WHERE name IN (%(old)s, %(new)s) ORDER BY group_id FOR NO KEY UPDATE
""")
# Its counters are stored with its offsets; a failed message leaves a row at once.
_HAS_WORKED = Statement("""
SELECT EXISTS (SELECT FROM {schema}.consumer_offset
               WHERE group_id = %(group_id)s AND handled + skipped + sent_back + dead > 0)
    OR EXISTS (SELECT FROM {schema}.failure WHERE group_id = %(group_id)s)
    OR EXISTS (SELECT FROM {schema}.dead_letter WHERE group_id = %(group_id)s)
""")
_RESERVE = Statement("""
INSERT INTO {schema}.consumer_group AS known (name, broadcast, paused)
SELECT %(new)s, broadcast, true FROM {schema}.consumer_group WHERE name = %(old)s
ON CONFLICT (name) DO UPDATE SET paused = true
""")
# As with a change of owner: rows that a former owner stores under an older epoch do not count.
_FENCE = Statement("""
UPDATE {schema}.queue_lease held SET owner = NULL, epoch = held.epoch + 1, expires_at = clock_timestamp()
FROM (SELECT queue_id FROM {schema}.queue_lease WHERE group_id = %(group_id)s ORDER BY queue_id FOR UPDATE) AS its
WHERE held.group_id = %(group_id)s AND held.queue_id = its.queue_id
""")
_EPOCHS = Statement("""
SELECT coalesce(string_agg(queue_id || ':' || epoch, ' ' ORDER BY queue_id), '')
FROM {schema}.queue_lease WHERE group_id = %(group_id)s
""")
_RENAME = Statement("UPDATE {schema}.consumer_group SET name = %(new)s WHERE group_id = %(group_id)s")
_RENAME_RETRIES = Statement("""
UPDATE {schema}.topic SET name = '%%RETRY%%' || %(new)s::text WHERE retry_of = %(group_id)s
""")


def is_renamed(run: Executor, old: str, new: str) -> bool:
    """Whether the broker knows only the new name. Raises UnknownGroup when it knows neither."""
    known = {name for name, _ in run.rows(_LOCK, {"old": old, "new": new})}
    if not known:
        raise unknown_group(old)
    return old not in known


def reserve(run: Executor, old: str, new: str, *, dry_run: bool = False) -> Reserved:
    """The first step: take the queues from former owners, and reserve the new name for this group.

    A consumer that starts under the new name from now on is paused. Call it again after an interruption. Raises
    UnknownGroup. Raises UsageError if consumers of either group are alive, or a group of the new name has worked
    already.
    """
    names.check_group(new)
    if old == new:
        raise UsageError(f"the group {old!r} has this name already: nothing was renamed.")
    with run.connection.transaction(force_rollback=dry_run):
        group_id, other_id = _locked(run, old, new)
        if other_id is not None:
            _refuse_worked(run, old, new, other_id)
        run.execute(_RESERVE, {"old": old, "new": new})
        run.execute(_FENCE, {"group_id": group_id})
        return Reserved(str(run.one(_EPOCHS, {"group_id": group_id})[0]))


def rename(run: Executor, old: str, new: str, reserved: Reserved) -> None:
    """The second step: give the group its new name.

    Raises the errors of `reserve`, and UsageError if the group was consumed meanwhile. It deletes the group of the new
    name, which was paused from the first step on.
    """
    with run.connection.transaction():
        group_id, other_id = _locked(run, old, new)
        if run.one(_EPOCHS, {"group_id": group_id})[0] != reserved.epochs:
            raise UsageError(
                f"consumers of {old!r} ran meanwhile, so its inbox may have rows that were not copied. {old!r} "
                f"still has its name: stop its workers and run this again."
            )
        if other_id is not None:
            _refuse_worked(run, old, new, other_id)
            delete_group(run, new)
        run.execute(_RENAME, {"new": new, "group_id": group_id})
        run.execute(_RENAME_RETRIES, {"new": new, "group_id": group_id})
    notify(run, Channel.SHARED)


def _locked(run: Executor, old: str, new: str) -> tuple[int, int | None]:
    """Return the ids of both groups; no consumer of them is alive or starts until the transaction ends."""
    ids = dict(run.rows(_LOCK, {"old": old, "new": new}))
    if old not in ids:
        raise unknown_group(old)
    for group_id in ids.values():
        refuse_live(run, group_id=group_id)
    return ids[old], ids.get(new)


def _refuse_worked(run: Executor, old: str, new: str, new_id: int) -> None:
    [has_worked] = run.one(_HAS_WORKED, {"group_id": new_id})
    if has_worked:
        raise UsageError(
            f"a group {new!r} is known and has handled messages, so {old!r} cannot take its name: choose another "
            f"one. If {new!r} was started by mistake, `outbox_group delete {new}` removes it first; what both groups "
            f"have handled has taken effect twice."
        )
