"""Installing the broker's tables, and refusing to work with tables of another age."""

from __future__ import annotations

import logging
from importlib import resources
from typing import Final

import psycopg

from outbox.broker.database import Connection
from outbox.broker.statement import Statement, check_schema_name
from outbox.errors import SchemaError

logger = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 1
# A rolling deploy runs this code on tables that the next release has not upgraded yet.
OLDEST_ACCEPTED_VERSION: Final = max(1, SCHEMA_VERSION - 1)
_FILES: Final = {1: "0001_initial.sql"}

_LOCK = Statement("SELECT pg_advisory_xact_lock(hashtextextended('outbox.install', 0))")
_EXISTS = Statement("SELECT to_regclass(%s) IS NOT NULL")
_VERSION = Statement("SELECT coalesce(max(version), 0) FROM {schema}.schema_version")
_CREATE_SCHEMA = Statement("CREATE SCHEMA IF NOT EXISTS {schema}")
_SEARCH_PATH = Statement("SET LOCAL search_path TO {schema}, pg_temp")
_RECORD = Statement("INSERT INTO {schema}.schema_version (version) VALUES (%s)")


def install(connection: Connection, schema: str = "outbox") -> int:
    """Create or upgrade the broker's tables; returns the version reached. Safe to run at any time, by many at once.

    Raises SchemaError when the tables are newer than this code.
    """
    check_schema_name(schema)
    with connection.transaction():
        connection.execute(_LOCK.on(schema))
        installed = _installed_version(connection, schema)
        if installed > SCHEMA_VERSION:
            raise _too_new(schema, installed)
        if installed == 0:
            connection.execute(_CREATE_SCHEMA.on(schema))
        for version in range(installed + 1, SCHEMA_VERSION + 1):
            _apply(connection, schema, version)
    return SCHEMA_VERSION


def check_schema(connection: Connection, schema: str = "outbox") -> int:
    """The version of the installed tables. Raises SchemaError when they are missing, too old or too new."""
    version = _installed_version(connection, schema)
    if version == 0:
        raise missing(schema)
    if version < OLDEST_ACCEPTED_VERSION:
        raise SchemaError(
            f"the broker's tables in schema {schema!r} have version {version}, this code needs "
            f"{OLDEST_ACCEPTED_VERSION} to {SCHEMA_VERSION}: run `manage.py migrate --database=ALIAS` with the alias "
            f"of the broker (outside Django: outbox.broker.install.install)."
        )
    if version > SCHEMA_VERSION:
        raise _too_new(schema, version)
    return version


def missing(schema: str) -> SchemaError:
    """The error for a database without the broker's tables."""
    return SchemaError(
        f"the broker's tables are not installed in schema {schema!r} of this database: run `manage.py migrate "
        f"--database=ALIAS` with the alias of the broker (outside Django: outbox.broker.install.install), or correct "
        f"the broker's connection or schema setting."
    )


def _too_new(schema: str, version: int) -> SchemaError:
    return SchemaError(
        f"the broker's tables in schema {schema!r} have version {version}, newer than this code ({SCHEMA_VERSION}): "
        f"upgrade the package."
    )


def _installed_version(connection: Connection, schema: str) -> int:
    if not _scalar(connection, _EXISTS.on(schema), f"{schema}.schema_version"):
        return 0
    return int(_scalar(connection, _VERSION.on(schema)))


def _scalar(connection: Connection, statement: bytes, *parameters: object) -> int:
    with psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row) as cursor:
        row = cursor.execute(statement, parameters or None).fetchone()
    assert row is not None
    return int(row[0])


def _apply(connection: Connection, schema: str, version: int) -> None:
    text = resources.files("outbox.broker").joinpath("schema", _FILES[version]).read_text("utf-8")
    before = connection.execute("SELECT current_setting('search_path')").fetchone()
    connection.execute(_SEARCH_PATH.on(schema))
    connection.execute(text.encode())
    connection.execute("SELECT set_config('search_path', %s, true)", before)
    connection.execute(_RECORD.on(schema), [version])
    logger.info("broker tables in schema %r are now at version %d", schema, version)
