"""Checks a MariaDB that is an application's database: version, engine, time zone, isolation and durability.

MariaDB needs these checks, because it would lose messages or effects without an error: it compares texts without case,
and a deadlock rolls the whole transaction back before the next statement begins another one. MySQL is refused: it lacks
RETURNING and SET STATEMENT, and no test runs on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.core.checks import CheckMessage, Error, Warning
from django.db.backends.base.base import BaseDatabaseWrapper

_ID: Final = "outbox.E039"

_SETTINGS: Final = """
SELECT @@tx_isolation = 'READ-UNCOMMITTED',
       TIMESTAMPDIFF(SECOND, UTC_TIMESTAMP(), NOW()),
       @@innodb_flush_log_at_trx_commit = 1 AND (@@log_bin = 0 OR @@sync_binlog = 1),
       @@idle_transaction_timeout + @@idle_write_transaction_timeout
"""

# Versions from 10.7 to 10.11.4 compare the last part of such an id first, so the order is not the order of time.
_ORDER: Final = """
SELECT CAST('01900000-0000-7000-8000-ffffffffffff' AS uuid) < CAST('01900000-0001-7000-8000-000000000000' AS uuid)
"""

_OTHER_ENGINES: Final = """
SELECT table_name, engine FROM information_schema.tables
WHERE table_schema = DATABASE() AND table_name LIKE 'outbox!_%%' ESCAPE '!' AND engine <> 'InnoDB' ORDER BY table_name
"""


def problems(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    """Yield what stands against this database. The vendor of `connection` is 'mysql'."""
    where = f"DATABASES[{connection.alias!r}]"
    if not getattr(connection, "mysql_is_mariadb", False):
        yield Error(
            f"{where} is MySQL. As an application's database outbox supports PostgreSQL, SQLite and MariaDB; no test "
            "has run on MySQL, and statements of outbox need MariaDB.",
            hint="Use MariaDB 10.6 or newer.",
            id=_ID,
        )
        return
    with connection.cursor() as cursor:
        yield from _versions(connection, cursor, where)
        cursor.execute(_SETTINGS)
        is_dirty, behind_utc_seconds, is_durable, idle_seconds = cursor.fetchone()
        if is_dirty:
            yield Error(
                f"the sessions of {where} read uncommitted rows: a check-back could mistake a running transaction for "
                "a committed one.",
                hint="Set OPTIONS['isolation_level'] to 'read committed'.",
                id=_ID,
            )
        if behind_utc_seconds:
            yield Error(
                f"the time zone of the sessions of {where} is not UTC (the difference is {behind_utc_seconds} s). "
                "Django stores times in UTC, but MariaDB fills the times of inbox and ledger with local time, so "
                "pruning would remove rows too early or too late.",
                hint="Set OPTIONS['init_command'] to \"SET time_zone = '+00:00'\".",
                id=_ID,
            )
        if not is_durable:
            yield Warning(
                f"the server of {where} may lose acknowledged commits, because innodb_flush_log_at_trx_commit or "
                "sync_binlog is not 1. So messages can be lost, or the broker can deliver messages of transactions "
                "that the server has lost.",
                hint="Set both parameters to 1.",
                id="outbox.W022",
            )
        if not idle_seconds:
            yield Warning(
                f"the server of {where} does not end idle transactions. If a consumer process stops in a handler, its "
                "message waits until the connection of this process ends.",
                hint="Set idle_transaction_timeout to four fifths of OUTBOX['LEASE_SECONDS'], for example with "
                "OPTIONS['init_command'].",
                id="outbox.W040",
            )
        cursor.execute(_OTHER_ENGINES)
        for table, engine in cursor.fetchall():
            yield Error(
                f"the table {table} of {where} has the engine {engine}, which has no transactions.",
                hint=f"Run ALTER TABLE {table} ENGINE = InnoDB, and set default_storage_engine to InnoDB.",
                id=_ID,
            )


def _versions(connection: Any, cursor: Any, where: str) -> Iterator[CheckMessage]:
    version = ".".join(map(str, connection.mysql_version))
    if connection.mysql_version < (10, 6):
        yield Error(
            f"{where} is MariaDB {version}; outbox needs RETURNING and SKIP LOCKED, so MariaDB 10.6 or newer.",
            id=_ID,
        )
    elif connection.features.has_native_uuid_field:
        cursor.execute(_ORDER)
        [is_ordered] = cursor.fetchone()
        if not is_ordered:
            yield Error(
                f"{where} is MariaDB {version}, which does not sort the ids of messages by time. Pruning would remove "
                "rows of the ledger that check-back still needs.",
                hint="Upgrade to 10.11.5 or newer.",
                id=_ID,
            )
