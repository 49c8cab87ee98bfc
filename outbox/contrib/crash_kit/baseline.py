"""The rows that the application's databases have before the first run, and their return before each further run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from django.db import connections
from psycopg import sql

from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.errors import UsageError

_TABLES: Final = """
SELECT format('%%I.%%I', nspname, relname) FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE relkind = 'r' AND NOT relispartition AND pg_table_is_visible(pg_class.oid) AND nspname <> 'pg_catalog'
  AND nspname NOT IN ('information_schema', %s)
ORDER BY 1
"""
_SEQUENCES: Final = """
SELECT format('%%I.%%I', schemaname, sequencename), last_value FROM pg_sequences
WHERE schemaname NOT IN ('information_schema', %s) AND last_value IS NOT NULL
"""
# The triggers of the application have done their work in the rows that are written back.
_TRIGGERED: Final = """
SELECT format('%%I.%%I', nspname, relname), quote_ident(tgname) FROM pg_trigger
JOIN pg_class ON pg_class.oid = tgrelid JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE NOT tgisinternal AND tgparentid = 0 AND tgenabled = 'O' AND relkind IN ('r', 'p')
  AND pg_table_is_visible(pg_class.oid) AND nspname <> %s
"""
_WAITS: Final = """
SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')
"""


@dataclass(frozen=True, slots=True)
class _Content:
    rows: dict[str, bytes]
    sequences: dict[str, int]


class Baseline:
    """The content of some databases, to which `restore` returns them.

    The connections stay open while processes are forked. The child processes do not touch these connections.
    """

    def __init__(self, aliases: Sequence[str], *, broker_schema: str) -> None:
        """Read the databases. Raises UsageError if one of them is no PostgreSQL database, or has a connection pool."""
        self._schema = broker_schema
        self._opened: dict[str, psycopg.Connection[Any]] = {}
        self._contents: dict[str, _Content] = {}
        for alias in aliases:
            if connections[alias].vendor != "postgresql":
                raise UsageError(
                    f"the crash kit cannot use the database {alias!r}, because it is not PostgreSQL: several processes "
                    "need the test database, and each run needs its rows back. Use PostgreSQL in the settings of this "
                    "test, or leave the alias out of `databases`."
                )
            if connections[alias].settings_dict["OPTIONS"].get("pool"):
                raise UsageError(
                    f"the crash kit cannot use the database {alias!r}, because it has a connection pool: a forked "
                    "process would use the connections of its parent. Remove OPTIONS['pool'] in the settings of this "
                    "test."
                )
            opened = self._opened[alias] = psycopg.connect(alias_conninfo(alias), autocommit=True)
            self._contents[alias] = self._read(opened)

    def close(self) -> None:
        """Close the connections."""
        for opened in self._opened.values():
            opened.close()

    def restore(self) -> None:
        """Return all tables and sequences to the content that they had first."""
        for alias, opened in self._opened.items():
            self._write(opened, self._contents[alias])

    def waits_for_lock(self) -> bool:
        """Whether a session of the application's databases waits for a lock.

        A child process asks, so it opens connections of its own: statements that it prepared on the connections of the
        parent would be unknown to the parent.
        """
        for alias in self._opened:
            with psycopg.connect(alias_conninfo(alias), autocommit=True) as own:
                if own.execute(_WAITS).fetchone() == (True,):
                    return True
        return False

    def _tables(self, opened: psycopg.Connection[Any]) -> list[str]:
        """Return the tables that have rows."""
        names = [name for (name,) in opened.execute(_TABLES, [self._schema])]
        if not names:
            return []
        parts = [
            sql.SQL("SELECT {} WHERE EXISTS (SELECT FROM {})").format(sql.Literal(name), sql.SQL(name))
            for name in names
        ]
        return [name for (name,) in opened.execute(sql.SQL(" UNION ALL ").join(parts))]

    def _read(self, opened: psycopg.Connection[Any]) -> _Content:
        return _Content(
            {name: b"".join(_copied(opened, name)) for name in self._tables(opened)},
            dict(opened.execute(_SEQUENCES, [self._schema]).fetchall()),
        )

    def _write(self, opened: psycopg.Connection[Any], content: _Content) -> None:
        filled = self._tables(opened)
        with opened.transaction():
            triggers = opened.execute(_TRIGGERED, [self._schema]).fetchall()
            for table, trigger in triggers:
                opened.execute(f"ALTER TABLE {table} DISABLE TRIGGER {trigger}".encode())
            if filled:
                # Also empties tables that refer to these. Those have no rows, or are among these.
                opened.execute(f"TRUNCATE {', '.join(filled)} RESTART IDENTITY CASCADE".encode())
            # Django's foreign keys are deferred, so the order of the tables does not matter.
            for name, rows in content.rows.items():
                with opened.cursor().copy(f"COPY {name} FROM STDIN (FORMAT binary)".encode()) as copy:
                    copy.write(rows)
            for name, last in content.sequences.items():
                opened.execute("SELECT setval(%s::regclass, %s)", [name, last])
            # ALTER TABLE refuses a table whose foreign keys are still to be checked.
            opened.execute("SET CONSTRAINTS ALL IMMEDIATE")
            for table, trigger in triggers:
                opened.execute(f"ALTER TABLE {table} ENABLE TRIGGER {trigger}".encode())


def _copied(opened: psycopg.Connection[Any], name: str) -> Iterator[bytes]:
    with opened.cursor().copy(f"COPY {name} TO STDOUT (FORMAT binary)".encode()) as copy:
        for part in copy:
            yield bytes(part)
