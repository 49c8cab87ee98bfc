"""How far the services have pruned their ledgers and inboxes, which are in databases that the broker cannot read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.fastpath.arrays import texts

LEDGER: Final = "ledger"
INBOX: Final = "inbox"


@dataclass(frozen=True, slots=True)
class Behind:
    """A table of a service, by the alias of its database. The oldest unexamined row is `seconds` past its time."""

    producer_group: str
    alias: str
    table: str
    seconds: float
    keep_seconds: float


_REPORT: Final = Statement("""
INSERT INTO {schema}.pruned_table (producer_group, alias, name, keep_seconds, pruned_to)
VALUES (%(group)s, %(alias)s, %(name)s, %(keep)s, %(pruned_to)s)
ON CONFLICT (producer_group, alias, name)
DO UPDATE SET keep_seconds = excluded.keep_seconds, pruned_to = excluded.pruned_to
""")


def report(
    run: Executor, producer_group: str, alias: str, name: str, *, keep_seconds: float, pruned_to: datetime
) -> None:
    """Store that all rows from before `pruned_to` were examined in the table `name` (LEDGER, INBOX) on `alias`."""
    values = {
        "group": producer_group,
        "alias": alias,
        "name": name,
        "keep": float(keep_seconds),
        "pruned_to": pruned_to,
    }
    run.execute(_REPORT, values)


_FORGET: Final = Statement("""
DELETE FROM {schema}.pruned_table WHERE producer_group = %(group)s AND alias <> ALL (%(aliases)s::text[])
""")


def forget_other_aliases(run: Executor, producer_group: str, aliases: Sequence[str]) -> int:
    """Remove the rows of databases that the service no longer has; returns how many there were."""
    return run.count(_FORGET, {"group": producer_group, "aliases": texts(list(aliases))})


_BEHIND: Final = Statement("""
SELECT producer_group, alias, name AS table,
       extract(epoch FROM clock_timestamp() - pruned_to)::double precision - keep_seconds AS seconds, keep_seconds
FROM {schema}.pruned_table ORDER BY seconds DESC
""")


def behind(run: Executor) -> list[Behind]:
    """Return every table that any service has reported, the one furthest behind first.

    If the passes fail or do not run, `seconds` grows.
    """
    return run.objects(Behind, _BEHIND)
