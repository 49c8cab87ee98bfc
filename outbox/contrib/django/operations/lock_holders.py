"""Names the session whose lock makes handlers fail, in the evidence of a condition.

    found = naming_lock_holders(conditions)    # outage: …, lock holder session 4711 of nightly-export, …

Handlers wait for a lock only until their timeout, so the waiting session is rarely there when an operator looks. If the
error of a fact is a lock timeout, this module looks for old transactions that may hold back writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections

from outbox.broker.operations.conditions import Condition, Fact
from outbox.contrib.django.database.in_tests import guarded_off
from outbox.contrib.django.ledger.ledger_checker import open_connection
from outbox.utils.safe_text import inert

_WAITED: Final = re.compile(r"lock timeout|LockNotAvailable", re.IGNORECASE)
# The operations page must not wait longer for a database that does not answer.
_CONNECT_SECONDS: Final = 2
# A younger transaction may be one that works: its locks are gone at the next look.
_SECONDS: Final = 5
# A strong lock is that of a whole table. A writer's lock is weak: most writers have not locked a row that a handler
# needs. Without pg_read_all_stats, only the strong locks of another role's session are listed.
_HOLDERS: Final = """
SELECT lock.pid, activity.application_name, usename, coalesce(activity.state, 'not visible to this role'),
       date_trunc('second', xact_start)::text,
       string_agg(DISTINCT relname || ' (' || replace(mode, 'Lock', '') || ')', ', '),
       bool_or(mode NOT IN ('RowShareLock', 'RowExclusiveLock')),
       coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::double precision
FROM pg_locks lock JOIN pg_class ON pg_class.oid = lock.relation
JOIN pg_stat_activity activity ON activity.pid = lock.pid
WHERE lock.granted AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND relkind IN ('r', 'p') AND mode NOT IN ('AccessShareLock', 'ShareUpdateExclusiveLock')
  AND (xact_start < clock_timestamp() - make_interval(secs => %s)
       OR xact_start IS NULL AND mode NOT IN ('RowShareLock', 'RowExclusiveLock'))
GROUP BY 1, 2, 3, 4, 5
"""


def naming_lock_holders(conditions: Sequence[Condition]) -> list[Condition]:
    """Return the conditions; facts whose error is a lock timeout also name the session that may hold the lock.

    That is the oldest with a strong lock, otherwise the oldest.
    """
    if not any(_has_waited(fact) for one in conditions for fact in one.evidence):
        return list(conditions)
    holders = sorted((one for alias in _databases() for one in _holders(alias)), key=lambda one: one[0], reverse=True)
    if not holders:
        return list(conditions)
    first = holders[0][1]
    if len(holders) > 1:
        name = next(iter(first))
        first[name] = f"{first[name]}, or {len(holders) - 1} more"
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
        # An alias whose engine cannot be imported raises ImproperlyConfigured.
        with suppress(ImproperlyConfigured):
            settings = connections[alias].settings_dict
            if connections[alias].vendor == "postgresql" and not guarded_off(alias):
                found.setdefault((settings["HOST"], settings["PORT"], settings["NAME"]), alias)
    return list(found.values())


def _holders(alias: str) -> Iterator[tuple[tuple[bool, float], dict[str, Any]]]:
    """Yield a fact for each session in a database, after whether its lock is strong and the age of its transaction."""
    try:
        opened = open_connection(alias, connect_seconds=_CONNECT_SECONDS)
        with closing(opened) as connection, connection.cursor() as cursor:
            cursor.execute(_HOLDERS, [_SECONDS])
            rows = cursor.fetchall()
    except (Error, ImproperlyConfigured):
        # The conditions and their errors are shown without it.
        return
    for pid, application, user, state, since, tables, is_strong, age in rows:
        session = f"session {pid} of {inert(application or 'a program without a name')}"
        fact = {
            "lock_holder" if is_strong else "possible_lock_holder": session,
            "user": user and inert(user),
            "state": state,
            "in_transaction_since": since,
            "locks": inert(tables),
            "database": alias,
        }
        if is_strong:
            fact["to_end_it"] = f"SELECT pg_terminate_backend({pid})"
        yield (is_strong, age), fact
