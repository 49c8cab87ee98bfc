"""Renames a consumer group and its data, in the broker and in the inboxes.

The inbox names a group, and the broker numbers it. So the inbox rows are copied first, while the new name is reserved
with a paused group: at each moment one of the two names has the positions and the complete inbox. A group that only the
code renames would handle its old messages twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Final, TypeVar

from django.db import router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError

from outbox.broker.database.executor import Executor
from outbox.broker.groups.registration import unknown_group
from outbox.broker.operations import changes
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.ledger import renaming as rows
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases, open_connection
from outbox.errors import LedgerUnavailable
from outbox.utils.faults import point

T = TypeVar("T")

_STILL_OLD: Final = (
    "so the group still has its former name: without its inbox rows, it would handle its messages again under the new "
    "name"
)


@dataclass(frozen=True, slots=True)
class Renamed:
    """The result of a rename. `renamed` is False if the group already had the new name, or in a dry run.

    `copied` has the number of copied inbox rows for each alias.
    """

    renamed: bool
    copied: Mapping[str, int]


def rename_group(old: str, new: str, *, dry_run: bool = False) -> Renamed:
    """Rename a group whose consumers are stopped. If the call is interrupted, call this function again.

    A message that the group has handled under its former name is not handled again under the new name. If consumers
    start under the new name too early, their group is paused until the broker has the new name. Rows with the former
    name stay in the inboxes until pruning removes them. Raises UnknownGroup, UsageError, BrokerError, or
    LedgerUnavailable if an inbox cannot be reached.
    """
    with broker_connection() as (connection, schema):
        run = Executor(connection, schema)
        if changes.is_renamed(run, old, new):
            if not any(on_each_inbox(lambda inbox: rows.has_copies(inbox, old, new), _STILL_OLD).values()):
                raise unknown_group(old)
            return Renamed(False, {})
        epochs = changes.reserve(run, old, new, dry_run=dry_run)
    if dry_run:
        return Renamed(False, {})
    point("rename.reserved")
    on_each_inbox(rows.wait_for_writers, _STILL_OLD)
    copied = on_each_inbox(lambda inbox: rows.copy(inbox, old, new), _STILL_OLD)
    point("rename.copied")
    # Copying the rows may take long, so the first connection to the broker may be closed by now.
    with broker_connection() as (connection, schema):
        changes.rename(Executor(connection, schema), old, new, epochs)
    point("rename.renamed")
    return Renamed(True, copied)


def on_each_inbox(work: Callable[[BaseDatabaseWrapper], T], consequence: str) -> dict[str, T]:
    """Call `work` with a connection to each database that has an inbox; return the results by alias.

    Raises LedgerUnavailable with `consequence` if one of the databases cannot be reached.
    """
    from outbox.contrib.django.models import InboxEntry

    found: dict[str, T] = {}
    for alias in ledger_aliases():
        if router.allow_migrate_model(alias, InboxEntry):
            try:
                with closing(open_connection(alias)) as connection:
                    if InboxEntry._meta.db_table in connection.introspection.table_names():
                        found[alias] = work(connection)
            except DatabaseError as error:
                raise LedgerUnavailable(
                    f"the inbox on {alias!r} cannot be read or written ({str(error).strip()}), {consequence}. Make "
                    "the database reachable, and run this command again."
                ) from error
    return found
