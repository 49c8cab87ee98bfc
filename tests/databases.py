"""Databases that tests take and give back: made from a template, and handed out again as the template was.

Making and dropping a database costs more than most tests that use one. So one that a test gives back is kept if it
can be proven to be as its template: under a new name, so that no holder of the old name can reach it; without a write
to a system catalogue; and with its tables and sequences put back. A database without this proof is dropped.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg import sql

from outbox.broker import embedded

_numbers = itertools.count(1)
Connection = psycopg.Connection[tuple[Any, ...]]

# Before this come the server's own objects.
_FIRST_OID: Final = 16384
# Rows about a database that the server keeps outside of it.
_ABOUT: Final = """
SELECT datdba, datacl, datconnlimit, datallowconn, dattablespace,
    ARRAY(SELECT setconfig FROM pg_db_role_setting WHERE setdatabase = pg_database.oid),
    ARRAY(SELECT slot_name FROM pg_replication_slots WHERE database = datname),
    ARRAY(SELECT subname FROM pg_subscription WHERE subdbid = pg_database.oid),
    ARRAY(SELECT description FROM pg_shdescription WHERE objoid = pg_database.oid)
FROM pg_database WHERE datname = current_database()
"""
_TABLES: Final = """
SELECT oid::regclass::text, pg_relation_size(oid), pg_total_relation_size(oid), relpages, reltuples FROM pg_class
WHERE relkind = 'r' AND relnamespace NOT IN ('pg_catalog'::regnamespace, 'information_schema'::regnamespace)
"""
# The server counts the writes of each table, also those of transactions that were rolled back, and a session that has
# ended has reported its own. So without a write to a catalogue the definitions are as they were, and only tables with
# writes can have other contents. VACUUM and ANALYZE change figures of pg_class without a write that is counted.
_WRITTEN: Final = """
SELECT oid::regclass::text, relnamespace = 'pg_catalog'::regnamespace FROM pg_class
WHERE relkind IN ('r', 'm', 'p') AND NOT relisshared AND relname NOT IN ('pg_statistic', 'pg_statistic_ext_data')
    AND pg_stat_get_tuples_inserted(oid) + pg_stat_get_tuples_updated(oid) + pg_stat_get_tuples_deleted(oid)
        + pg_stat_get_vacuum_count(oid) + pg_stat_get_autovacuum_count(oid)
        + pg_stat_get_analyze_count(oid) + pg_stat_get_autoanalyze_count(oid) > 0
"""
# A crash of the server sets all counts to 0, and this time to that of its new start.
_COUNTED_FROM: Final = """
SELECT oid, pg_stat_get_db_stat_reset_time(oid) FROM pg_database WHERE datname = current_database()
"""
_STATISTICS: Final = "DELETE FROM pg_catalog.pg_statistic WHERE starelid >= %s"
_SIZES: Final = """
SELECT oid::regclass::text, pg_table_size(oid), relpages, reltuples FROM pg_class WHERE oid = ANY(%s::regclass[])
"""
# TRUNCATE makes new files of the table, its indexes and its TOAST table, which takes as long as all else that puts a
# database back. If a table has no figures of the planner, up to ten pages count as ten, so plans are the same.
_SMALL: Final = 64 * 1024
_SEQUENCES: Final = "SELECT seqrelid::regclass::text FROM pg_sequence ORDER BY 1"
_REFERENCES: Final = "SELECT confrelid::regclass::text, conrelid::regclass::text FROM pg_constraint WHERE contype = 'f'"
_END_SESSIONS: Final = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND backend_type <> 'autovacuum worker'
"""
_ENDING_SECONDS: Final = 5.0
# With one of these no database can be renamed, nor dropped.
_PREPARED: Final = "SELECT gid FROM pg_prepared_xacts WHERE database = %s"


@dataclass(frozen=True)
class Data:
    """The contents of tables and sequences, by name."""

    tables: Mapping[str, tuple[Any, ...]]
    "Sizes and the planner's figures."
    rows: Mapping[str, list[bytes]]
    "Of tables that have any page in the template. Without one, and with the same sizes, there is no row."
    sequences: Mapping[str, tuple[int, bool]]


class Template:
    """A template as it was at first use; it makes databases that were copied from it so again."""

    def __init__(self, server_url: str, name: str) -> None:
        self.name = name
        self._server_url = server_url
        with _connect(server_url, name) as connection:
            # Database -> since when its writes are counted, if it was as the template at that time.
            self._counted_from: dict[int, datetime] = {}
            self._sequences = _sequence_query([name for (name,) in connection.execute(_SEQUENCES)])
            self._about = connection.execute(_ABOUT).fetchall()
            tables = _tables(connection)
            rows = {name: _read(connection, name) for name, (size, *_) in tables.items() if size}
            self.data = Data(tables, rows, self._values(connection))
            self._referring: dict[str, set[str]] = defaultdict(set)
            for referred, referring in connection.execute(_REFERENCES):
                self._referring[referred].add(referring)

    def reset(self, name: str) -> bool:
        """Restore the data of a database without connections; False if a definition may have changed."""
        with _connect(self._server_url, name) as connection:
            changed = self._written(connection)
            if changed is None:
                return False
            sequences = self._values(connection)
            with connection.transaction():
                # No trigger, no rule and no foreign key acts on what follows.
                connection.execute("SET LOCAL session_replication_role = replica")
                if truncated := self._with_referring(self._large(connection, changed)):
                    tables = sql.SQL(", ").join(map(_as_given, sorted(truncated)))
                    connection.execute(sql.SQL("TRUNCATE {}").format(tables))
                    changed |= truncated
                if deleted := sorted(changed - truncated):
                    statements = [sql.SQL("DELETE FROM {}").format(_as_given(table)) for table in deleted]
                    connection.execute(sql.SQL("; ").join(statements))
                for table in sorted(changed & self.data.rows.keys()):
                    _write(connection, table, self.data.rows[table])
                for sequence, value in self.data.sequences.items():
                    if sequences[sequence] != value:
                        connection.execute("SELECT setval(%s::regclass, %s, %s)", [sequence, *value])
                connection.execute("SET LOCAL allow_system_table_mods = on")
                connection.execute(_STATISTICS, [_FIRST_OID])
            self.count_anew(connection)
        return True

    def count_anew(self, connection: Connection) -> None:
        """Let the server count writes from now on: the database is as the template."""
        # Else this session would report its own writes when it ends.
        connection.execute("SELECT pg_stat_force_next_flush()")
        connection.execute("SELECT pg_stat_reset()")
        [(number, counted_from)] = connection.execute(_COUNTED_FROM).fetchall()
        self._counted_from[number] = counted_from

    def _written(self, connection: Connection) -> set[str] | None:
        """The tables that were written since the last reset.

        None if this is not known, or if a definition may have changed.
        """
        [(number, counted_from)] = connection.execute(_COUNTED_FROM).fetchall()
        if counted_from is None or self._counted_from.get(number) != counted_from:
            return None
        written = connection.execute(_WRITTEN).fetchall()
        if any(is_catalogue for _, is_catalogue in written) or connection.execute(_ABOUT).fetchall() != self._about:
            return None
        return {name for name, _ in written}

    def _large(self, connection: Connection, names: Iterable[str]) -> list[str]:
        """Those of the tables that only TRUNCATE puts back: of many pages, or with other figures of the planner."""
        found = connection.execute(_SIZES, [list(names)])
        return [
            name for name, size, *plan in found if size > _SMALL or tuple(plan) != self.data.tables.get(name, ())[2:]
        ]

    def _values(self, connection: Connection) -> dict[str, tuple[int, bool]]:
        found = connection.execute(self._sequences).fetchall() if self._sequences else []
        return {name: (value, is_called) for name, value, is_called in found}

    def _with_referring(self, names: Iterable[str]) -> set[str]:
        """The tables, and those that TRUNCATE requires with them."""
        open_, changed = list(names), set[str]()
        while open_:
            name = open_.pop()
            if name not in changed:
                changed.add(name)
                open_.extend(self._referring.get(name, ()))
        return changed


class Pool:
    """The databases of one worker."""

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._templates: dict[str, Template] = {}
        self._free: dict[str, list[str]] = defaultdict(list)
        # It stays open: a session costs more than what it is opened for.
        self._administering = psycopg.connect(server_url, autocommit=True)

    def take(self, template: str) -> str:
        """The name of a database that is as `template` was when it was first asked for."""
        if template not in self._templates:
            self._templates[template] = Template(self._server_url, template)
        if self._free[template]:
            return self._free[template].pop()
        name = new_name()
        embedded.create_database(self._server_url, name, template=template)
        with _connect(self._server_url, name) as connection:
            self._templates[template].count_anew(connection)
        return name

    def give_back(self, name: str, template: str) -> None:
        """Its connections are closed; it is handed out again if it can be restored, else dropped."""
        renamed = self._take_away(name)
        if renamed and self._templates[template].reset(renamed):
            self._free[template].append(renamed)
        else:
            drop_databases(self._server_url, [renamed or name])

    def close(self) -> None:
        """Drop all."""
        drop_databases(self._server_url, itertools.chain.from_iterable(self._free.values()))
        self._free.clear()
        self._administering.close()

    def _take_away(self, name: str) -> str | None:
        """Its new name; None if it is gone, or if a session keeps it in use."""
        renamed = new_name()
        connection = self._administering
        end_sessions(connection, name)
        if connection.execute(_PREPARED, [name]).fetchone():
            return None
        try:
            connection.execute(
                sql.SQL("ALTER DATABASE {} RENAME TO {}").format(sql.Identifier(name), sql.Identifier(renamed))
            )
        except (psycopg.errors.ObjectInUse, psycopg.errors.InvalidCatalogName):
            return None
        return renamed


def new_name() -> str:
    """Of a database; none is used twice."""
    return f"outbox_test_{os.getpid()}_{next(_numbers)}"


def end_sessions(connection: Connection, name: str) -> None:
    """Wait until no session uses the database.

    A session that a test has just closed takes a millisecond to end. If one is left, RENAME, DROP and
    pg_terminate_backend each look again after a tenth of a second only.
    """
    deadline = time.monotonic() + _ENDING_SECONDS
    while connection.execute(_END_SESSIONS, [name]).fetchone() and time.monotonic() < deadline:
        time.sleep(0.002)


def drop_databases(url: str, names: Iterable[str]) -> None:
    """Drop the existing ones, with their connections."""
    names = list(names)
    if not names:
        return
    with psycopg.connect(url, autocommit=True) as connection:
        for name in names:
            end_sessions(connection, name)
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def _connect(server_url: str, name: str) -> Connection:
    # Without a search path names are whole. A test may have given the database a style that psycopg does not read.
    options = (
        "-c search_path= -c datestyle=ISO -c synchronous_commit=off -c jit=off -c max_parallel_workers_per_gather=0"
    )
    return psycopg.connect(embedded.database_url(server_url, name), autocommit=True, options=options)


def _sequence_query(names: Iterable[str]) -> sql.Composed | None:
    one = "SELECT {name}, last_value, is_called FROM {table}"
    parts = [sql.SQL(one).format(name=sql.Literal(name), table=_as_given(name)) for name in names]
    return sql.SQL(" UNION ALL ").join(parts) if parts else None


def _tables(connection: Connection) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(figures) for name, *figures in connection.execute(_TABLES)}


def _read(connection: Connection, table: str) -> list[bytes]:
    with connection.cursor().copy(sql.SQL("COPY {} TO STDOUT").format(_as_given(table))) as copy:
        return sorted(bytes(line) for line in copy)


def _write(connection: Connection, table: str, rows: Iterable[bytes]) -> None:
    with connection.cursor().copy(sql.SQL("COPY {} FROM STDIN").format(_as_given(table))) as copy:
        for row in rows:
            copy.write(row)


def _as_given(name: str) -> sql.SQL:
    """A name as `regclass` writes it: already quoted where it needs quotes."""
    return sql.SQL(name)
