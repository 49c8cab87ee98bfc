"""Installing the broker's tables, and refusing to work with tables of another age."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Final, TypeVar

from psycopg.errors import DeadlockDetected, LockNotAvailable

from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement, check_schema_name
from outbox.broker.database.timeouts import lifted
from outbox.errors import ConfigurationError, SchemaError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FILES: Final = {
    1: "0001_initial.sql",
    2: "0002_additive_changes.sql",
    3: "0003_resync.sql",
    4: "0004_finished_ahead.sql",
    5: "0005_parked_and_recalled.sql",
    6: "0006_fencing.sql",
    7: "0007_suspects.sql",
    8: "0008_periodic_pass.sql",
    9: "0009_told_views.sql",
    10: "0010_meaning.sql",
    11: "0011_operations.sql",
    12: "0012_sql_publish.sql",
    13: "0013_tick.sql",
    14: "0014_one_call.sql",
    15: "0015_lives.sql",
    16: "0016_standing_in.sql",
    17: "0017_restores.sql",
}
SCHEMA_VERSION: Final = max(_FILES)

# UNIQUE NULLS NOT DISTINCT came with it.
MINIMUM_POSTGRESQL: Final = 15

# An attempt waits so many seconds for the lock of a table. Waiting for one, a change makes everybody else wait behind
# it, and holding others it may wait for who waits for it: better to let go of all of them and come again. The waits are
# shorter than PostgreSQL's deadlock_timeout (1 s), so that they end none of the others' transactions.
_FIRST_WAIT: Final = 0.1
_LONGEST_WAIT: Final = 0.8
# Seconds for which one change is tried: transactions that follow one another leave a gap at some time.
_PATIENCE: Final = 60.0

_LOCK = Statement("SELECT pg_advisory_xact_lock(hashtextextended('outbox.install', 0))")
_LIMIT_WAITING = Statement("SELECT set_config('lock_timeout', %(milliseconds)s, true)")
_EXISTS = Statement("SELECT to_regclass(%(table)s) IS NOT NULL")
# The column came with the second change.
_VERSION = Statement("""
SELECT coalesce(max(version), 0), coalesce(max((to_jsonb(known) ->> 'change')::integer), max(version), 0)
FROM {schema}.schema_version known
""")
_CREATE_SCHEMA = Statement("CREATE SCHEMA IF NOT EXISTS {schema}")
_SEARCH_PATH = Statement("SET LOCAL search_path TO {schema}, pg_temp")
_GET_SEARCH_PATH = Statement("SELECT current_setting('search_path')")
_SET_SEARCH_PATH = Statement("SELECT set_config('search_path', %(path)s, true)")
_RECORD_FIRST = Statement("INSERT INTO {schema}.schema_version (version) VALUES (1)")
_RECORD = Statement("UPDATE {schema}.schema_version SET change = %(version)s")


@dataclass(frozen=True, slots=True)
class _Installed:
    """What the tables say of themselves: the version that code must know, and the last change applied."""

    needs: int
    change: int


def install(connection: Connection, schema: str = "outbox") -> int:
    """Create or upgrade the broker's tables; returns the version reached. Safe to run at any time, by many at once.

    Code of the version before goes on working on the upgraded tables: upgrade them first, then deploy the code. Each
    change is a transaction of its own, so that it holds few tables for a short time; what is interrupted is finished
    by the next call. Raises SchemaError when this code is too old for the tables, or when open transactions were in
    the way, and ConfigurationError when the server is too old.
    """
    check_schema_name(schema)
    check_server(connection.info.server_version)
    run = Executor(connection, schema)
    while (reached := change_tables(run, lambda: _apply_next(run), what="upgraded")) < SCHEMA_VERSION:
        pass
    return reached


def change_tables(run: Executor, change: Callable[[], T], *, what: str) -> T:
    """Run `change` in a transaction of its own, one at a time, and again while open transactions are in its way.

    Raises SchemaError after a minute of that; nothing of `change` is done then. `what` says what the tables were not.
    """
    began, wait = time.monotonic(), _FIRST_WAIT
    while True:
        try:
            with lifted(run.connection):
                run.execute(_LOCK)
                run.execute(_LIMIT_WAITING, {"milliseconds": str(round(wait * 1000))})
                return change()
        except (LockNotAvailable, DeadlockDetected) as error:
            passed, met = time.monotonic() - began, error.diag.message_primary
            if passed > _PATIENCE:
                raise SchemaError(
                    f"the broker's tables in schema {run.schema!r} were not {what}: for {passed:.0f} s, each time they "
                    f"were tried, other transactions held one of them ({met}). The change that was tried did nothing; "
                    f"end what has long been open (pg_stat_activity, pg_prepared_xacts) and run this again."
                ) from error
        logger.info("open transactions are in the way of the broker's tables for %.1f s: %s", passed, met)
        # Not in step with who works in rounds.
        time.sleep(random.uniform(0, wait))
        wait = min(2 * wait, _LONGEST_WAIT)


def recreate(run: Executor, *, after: int = 0) -> None:
    """Apply every change after the one with this number."""
    for version in range(after + 1, SCHEMA_VERSION + 1):
        _apply(run, version)


def installed_version(connection: Connection, schema: str = "outbox") -> int:
    """The last change applied to the tables, whatever this code knows; 0 where there are none."""
    return _installed(Executor(connection, schema)).change


def check_schema(connection: Connection, schema: str = "outbox") -> int:
    """The version of the installed tables, this code's or a later one that serves it too.

    Raises SchemaError when they are missing, lack a change that this code needs, or are too new for it, and
    ConfigurationError when the server is too old.
    """
    check_server(connection.info.server_version)
    installed = _installed(Executor(connection, schema))
    if installed.needs == 0:
        raise missing(schema)
    if installed.needs > SCHEMA_VERSION:
        raise _too_new(schema, installed)
    if installed.change < SCHEMA_VERSION:
        raise SchemaError(
            f"the broker's tables in schema {schema!r} have version {installed.change}, this code needs "
            f"{SCHEMA_VERSION}: run `manage.py migrate --database=ALIAS` with the alias of the broker (outside Django: "
            f"outbox.broker.schema.install.install). Code of the version before keeps working on the upgraded tables."
        )
    return installed.change


def check_server(server_version: int) -> None:
    """Raise ConfigurationError unless PostgreSQL of this version (`server_version_num`, such as 150004) will do."""
    if server_version < MINIMUM_POSTGRESQL * 10_000:
        raise ConfigurationError(
            f"the broker needs PostgreSQL {MINIMUM_POSTGRESQL} or newer; this server is {server_version // 10_000}."
            f"{server_version % 10_000}: upgrade it, or point the broker at another database (OUTBOX['BROKER'])."
        )


def missing(schema: str) -> SchemaError:
    """The error for a database without the broker's tables."""
    return SchemaError(
        f"the broker's tables are not installed in schema {schema!r} of this database: run `manage.py migrate "
        f"--database=ALIAS` with the alias of the broker (outside Django: outbox.broker.schema.install), or "
        f"correct the broker's connection or schema setting."
    )


def _too_new(schema: str, installed: _Installed) -> SchemaError:
    return SchemaError(
        f"the broker's tables in schema {schema!r} have version {installed.change} and need code that knows version "
        f"{installed.needs}, newer than this code ({SCHEMA_VERSION}): upgrade the package."
    )


def _installed(run: Executor) -> _Installed:
    [exists] = run.one(_EXISTS, {"table": f"{run.schema}.schema_version"})
    if not exists:
        return _Installed(needs=0, change=0)
    needs, change = run.one(_VERSION)
    return _Installed(needs=needs, change=change)


def _apply_next(run: Executor) -> int:
    """Apply the first change that is missing; returns the number of the last one that is there."""
    installed = _installed(run)
    if installed.needs > SCHEMA_VERSION:
        raise _too_new(run.schema, installed)
    if installed.change >= SCHEMA_VERSION:
        return installed.change
    if installed.change == 0:
        run.execute(_CREATE_SCHEMA)
    _apply(run, installed.change + 1)
    return installed.change + 1


def _apply(run: Executor, version: int) -> None:
    text = resources.files("outbox.broker.schema").joinpath(_FILES[version]).read_text("utf-8")
    [before] = run.one(_GET_SEARCH_PATH)
    run.execute(_SEARCH_PATH)
    # Many statements at once, so without parameters and in text form.
    run.connection.execute(text.encode())
    run.execute(_SET_SEARCH_PATH, {"path": before})
    if version == 1:
        run.execute(_RECORD_FIRST)
    else:
        run.execute(_RECORD, {"version": version})
    logger.info("broker tables in schema %r are now at version %d", run.schema, version)
