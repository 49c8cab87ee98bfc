"""Names the session whose lock makes handlers fail, in the evidence of a condition.

    found = naming_lock_holders(conditions)    # outage: …, lock holder session 4711 of nightly-export, …

Handlers wait for a lock only until their timeout, so the waiting session is rarely there when an operator looks. But
the session that holds the lock is. If the error of a fact is a timeout, this module looks into the databases of the
project for old transactions that may hold back writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Final

from django.db import Error, connections

from outbox.broker.operations.conditions import Condition, Fact
from outbox.contrib.django.database.in_tests import guarded_off
from outbox.contrib.django.ledger.ledger_checker import open_connection

_WAITED: Final = re.compile(
    r"lock timeout|lock_timeout|LockNotAvailable|statement timeout|QueryCanceled", re.IGNORECASE
)
# A younger transaction may be one that works: its locks are gone at the next look.
_SECONDS: Final = 5
# First the locks of a whole table that hold back every write, then those of writers, which may have locked a row that a
# handler needs. Without pg_read_all_stats, PostgreSQL shows neither state nor age of another role's session, and only
# its locks of whole tables are listed.
_HOLDERS: Final = """
SELECT lock.pid, activity.application_name, usename, coalesce(activity.state, 'not visible to this role'),
       date_trunc('second', xact_start)::text,
       string_agg(DISTINCT relname || ' (' || replace(mode, 'Lock', '') || ')', ', ')
FROM pg_locks lock JOIN pg_class ON pg_class.oid = lock.relation
JOIN pg_stat_activity activity ON activity.pid = lock.pid
WHERE lock.granted AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND relkind IN ('r', 'p') AND mode NOT IN ('AccessShareLock', 'ShareUpdateExclusiveLock')
  AND (xact_start < clock_timestamp() - make_interval(secs => %s)
       OR xact_start IS NULL AND mode NOT IN ('RowShareLock', 'RowExclusiveLock'))
GROUP BY 1, 2, 3, 4, 5
ORDER BY bool_or(mode NOT IN ('RowShareLock', 'RowExclusiveLock')) DESC, 5
"""


def naming_lock_holders(conditions: Sequence[Condition]) -> list[Condition]:
    """Return the conditions; facts whose error is a timeout also name the session that may hold the lock.

    A fact names the first session, with the number of others. It stays as it is if no such session is visible.
    """
    if not any(_has_waited(fact) for one in conditions for fact in one.evidence):
        return list(conditions)
    holders = [holder for alias in _databases() for holder in _holders(alias)]
    if not holders:
        return list(conditions)
    first = dict(holders[0])
    if len(holders) > 1:
        first["lock_holder"] = f"{first['lock_holder']}, or {len(holders) - 1} more"
    return [
        replace(one, evidence=[{**fact, **first} if _has_waited(fact) else fact for fact in one.evidence])
        for one in conditions
    ]


def _has_waited(fact: Fact) -> bool:
    return _WAITED.search(str(fact.get("error") or "")) is not None


def _databases() -> list[str]:
    """An alias of each PostgreSQL database of the project."""
    found: dict[tuple[object, ...], str] = {}
    for alias in connections:
        settings = connections[alias].settings_dict
        if connections[alias].vendor == "postgresql" and not guarded_off(alias):
            found.setdefault((settings["HOST"], settings["PORT"], settings["NAME"]), alias)
    return list(found.values())


def _holders(alias: str) -> Iterator[Fact]:
    try:
        with closing(open_connection(alias)) as connection, connection.cursor() as cursor:
            cursor.execute(_HOLDERS, [_SECONDS])
            rows = cursor.fetchall()
    except Error:
        # The conditions and their errors are shown without it.
        return
    for pid, application, user, state, since, tables in rows:
        yield {
            "lock_holder": f"session {pid} of {application or 'a program without a name'}",
            "user": user,
            "state": state,
            "in_transaction_since": since,
            "locks": tables,
            "database": alias,
            "to_end_it": f"SELECT pg_terminate_backend({pid})",
        }
