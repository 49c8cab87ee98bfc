"""Install and upgrade the broker's tables, and refuse to work with tables of an unsuitable version.

The tables of the core come first, then those of each installed part (`hooks.add_schema`), in the same way: files of
SQL, a version, one transaction per change. See decision 023.
"""

from __future__ import annotations

import logging
import math
import random
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

from psycopg import sql
from psycopg.errors import DeadlockDetected, LockNotAvailable

from outbox import hooks
from outbox.broker.database import arrays
from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement, check_schema_name
from outbox.broker.database.timeouts import lifted
from outbox.broker.schema import catalogue, grants, table_locks
from outbox.errors import ConfigurationError, SchemaError

logger = logging.getLogger(__name__)

# current.sql creates the tables of a new database, functions/ has one file per function, and changes/ the changes of
# released tables, such as changes/0002_title.sql, with the existing tables that each locks (docs/decisions/196).
_FOLDER: Final = resources.files("outbox.broker.schema")


def _numbered(folder: Traversable) -> dict[int, Traversable]:
    files = folder.iterdir() if folder.is_dir() else ()
    return {int(file.name[:4]): file for file in files if file.name.endswith(".sql")}


_CHANGES: Final = _numbered(_FOLDER.joinpath("changes"))
SCHEMA_VERSION: Final = max(_CHANGES, default=1)
# The name of the core in the table schema_version.
CORE: Final = "core"


@dataclass(frozen=True, slots=True)
class _Files:
    """The SQL files of the core or of a part, and the version to which they bring its tables."""

    name: str
    folder: Traversable
    changes: Mapping[int, Traversable]
    version: int

    def __str__(self) -> str:
        return "the broker's tables" if self.name == CORE else f"the tables of the part {self.name!r}"


@cache
def _of_part(part: str, package: str) -> _Files:
    folder = resources.files(package)
    changes = _numbered(folder.joinpath("changes"))
    return _Files(part, folder, changes, max(changes, default=1))


def _files() -> list[_Files]:
    core = _Files(CORE, _FOLDER, _CHANGES, SCHEMA_VERSION)
    return [core, *(_of_part(part, package) for part, package in hooks.schemas.items())]


_LOCKS: Final = re.compile(r"^-- Locks: (.+)$", re.MULTILINE)

# PostgreSQL 15 introduced UNIQUE NULLS NOT DISTINCT.
MINIMUM_POSTGRESQL: Final = 15

# The number of seconds for which `install` tries to make one change.
DEFAULT_PATIENCE_SECONDS: Final = 60.0
# The number of first attempts that do not wait for a lock, so that they delay no other transaction. Each later attempt
# waits longer than the one before, up to `_LONGEST_WAIT_SECONDS`.
_ATTEMPTS_WITHOUT_WAIT: Final = 20
_FIRST_WAIT_SECONDS: Final = 0.01
_WAIT_GROWTH: Final = 2.0
# Shorter than PostgreSQL's deadlock_timeout (1 s), so that PostgreSQL reports no deadlock and ends no transaction that
# waits behind this change.
_LONGEST_WAIT_SECONDS: Final = 0.8
# Before the first attempt, `install` reports each transaction that has used a table for longer than this many seconds.
# Younger transactions are not reported, because they will probably end soon.
_NAMED_AFTER_SECONDS: Final = 1.0
_REPORT_EVERY_SECONDS: Final = 10.0
_NAMED: Final = 5

_LOCK = Statement("SELECT pg_advisory_xact_lock(hashtextextended('outbox.install', 0))")
_EXISTS = Statement("SELECT to_regclass(%(table)s) IS NOT NULL")
_CREATE_SCHEMA = Statement("CREATE SCHEMA IF NOT EXISTS {schema}")
_SEARCH_PATH = Statement("SET LOCAL search_path TO {schema}, pg_temp")
_GET_SEARCH_PATH = Statement("SELECT current_setting('search_path')")
_SET_SEARCH_PATH = Statement("SELECT set_config('search_path', %(path)s, true)")
# A function may call another function that is created after it.
_UNCHECKED_BODIES = Statement("SET LOCAL check_function_bodies TO off")
_VERSIONS = Statement("SELECT name, version, minimum_code FROM {schema}.schema_version")
_RECORD = Statement("""
INSERT INTO {schema}.schema_version AS known (name, version, leads, objects)
VALUES (%(name)s, %(version)s, %(leads)s, %(objects)s::text[])
ON CONFLICT (name) DO UPDATE SET version = excluded.version, leads = excluded.leads, applied_at = now(),
    objects = ARRAY(SELECT unnest(known.objects) UNION SELECT unnest(excluded.objects) ORDER BY 1)
""")


@dataclass(frozen=True, slots=True)
class _Installed:
    """The version of the installed tables of the core or of a part (0: missing), and of code that may use them."""

    version: int
    minimum_code: int


# The tables that are locked before a change of the tables, and what makes the change.
Planned = tuple[Sequence[str], Callable[[], object]]


def install(
    connection: Connection,
    schema: str = "outbox",
    *,
    patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
    report: Callable[[str], None] = logger.warning,
) -> int:
    """Create or upgrade the broker's tables and those of the installed parts. Return the new version of the core's.

    Several processes may call this function at the same time. Code of the previous version keeps working on the
    upgraded tables: upgrade the tables first, then deploy the code. Each change is a separate transaction; the next
    call finishes an interrupted upgrade. `report` receives the sessions that block it.

    Raises SchemaError when this code is too old for the tables, and when other transactions have used them for
    `patience_seconds`. Raises ConfigurationError when the server is too old.
    """
    check_schema_name(schema)
    check_server(connection.info.server_version)
    run = Executor(connection, schema)
    while change_tables(
        run, lambda: _plan_next(run), what="upgraded", patience_seconds=patience_seconds, report=report
    ):
        pass
    return installed_version(connection, schema)


def change_tables(
    run: Executor,
    plan: Callable[[], Planned | None],
    *,
    what: str,
    patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
    report: Callable[[str], None] = logger.warning,
) -> bool:
    """Make the planned change in one transaction, as soon as no other transaction uses its tables. False: no plan.

    `plan` is called under the lock that admits only one installation at a time. After `patience_seconds`, raises
    SchemaError and changes nothing. `what` is the word for the change in this error, such as "dropped".
    """
    began, attempt, reported_at = time.monotonic(), 0, -math.inf
    tables: Sequence[str] = ()
    while True:
        wait_seconds = _wait_seconds(attempt)
        try:
            with lifted(run.connection):
                run.execute(_LOCK)
                planned = plan()
                if planned is None:
                    return False
                tables, change = planned
                if tables:
                    if attempt == 0:
                        reported_at = _report_holders(run, tables, report, reported_at)
                    table_locks.take(run, tables, wait_seconds=wait_seconds)
                change()
                return True
        except (LockNotAvailable, DeadlockDetected) as error:
            passed, met = time.monotonic() - began, error.diag.message_primary
            if passed > patience_seconds:
                raise _in_use(run, tables, what, passed) from error
        logger.debug("tables %s are still in use after %.1f s: %s", ", ".join(tables), passed, met)
        if time.monotonic() - reported_at > _REPORT_EVERY_SECONDS:
            reported_at = _report_holders(run, tables, report, reported_at)
        # Random, so that attempts do not always meet the same periodic transaction.
        time.sleep(random.uniform(2, 6) * max(wait_seconds, _FIRST_WAIT_SECONDS))
        attempt += 1


def give_rights(
    run: Executor, statements: Sequence[str], *, patience_seconds: float = DEFAULT_PATIENCE_SECONDS
) -> None:
    """Execute the statements of `grants.plan` but its comments, in one transaction.

    Raises psycopg.Error if the connected role may not execute them, and SchemaError as `change_tables` does.
    """

    def change() -> None:
        for statement in statements:
            if not statement.startswith("--"):
                run.connection.execute(statement.encode())

    change_tables(
        run,
        lambda: (grants.tables_to_own(run), change),
        what="given to their new owner",
        patience_seconds=patience_seconds,
    )


def _wait_seconds(attempt: int) -> float:
    if attempt < _ATTEMPTS_WITHOUT_WAIT:
        return 0.0
    grown = _FIRST_WAIT_SECONDS * _WAIT_GROWTH ** min(attempt - _ATTEMPTS_WITHOUT_WAIT, 100)
    return min(grown, _LONGEST_WAIT_SECONDS)


def _report_holders(run: Executor, tables: Sequence[str], report: Callable[[str], None], reported_at: float) -> float:
    """Report the transactions that have used the tables for a long time, and return the time of the last report."""
    if found := table_locks.holders(run, tables, at_least_seconds=_NAMED_AFTER_SECONDS):
        report(f"these transactions block the change of the broker's tables in schema {run.schema!r}: {_few(found)}")
        return time.monotonic()
    return reported_at


def _few(found: Sequence[object]) -> str:
    more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return "; ".join(map(str, found[:_NAMED])) + more


def _in_use(run: Executor, tables: Sequence[str], what: str, passed: float) -> SchemaError:
    used = _few(table_locks.in_order(tables))
    now = _few(table_locks.holders(run, tables)) or "nothing"
    return SchemaError(
        f"the broker's tables in schema {run.schema!r} were not {what}: at each attempt within "
        f"{passed:.0f} s, other transactions used one of {used}. Blocking sessions: {now}. The tables are unchanged. "
        f"End the transactions that have long been open (pg_terminate_backend, ROLLBACK PREPARED), or cancel an "
        f"autovacuum (pg_cancel_backend). Then run this command again. With `--patience SECONDS`, `outbox_install` "
        f"tries for SECONDS seconds."
    )


def apply(run: Executor, files: _Files, version: int, sql_file: Traversable) -> None:
    """Execute the file that brings the tables of the core or of a part to this version, and record what it has created.

    The last file also brings all functions up to date: until then, code of the previous release calls the old ones.
    """
    before = catalogue.names(run)
    if "schema_version" in before:
        # The row comes first, because the file may raise its minimum_code.
        _record(run, files, version, ())
    else:
        run.execute(_CREATE_SCHEMA)
    _execute(run, sql_file)
    if version == files.version:
        _create_functions(run, files)
    _record(run, files, version, catalogue.names(run) - before)
    grants.renew(run)
    logger.info("%s in schema %r are now at version %d", files, run.schema, version)


def _record(run: Executor, files: _Files, version: int, created: Collection[str]) -> None:
    leads = files.name in hooks.leader_work
    values = {"name": files.name, "version": version, "leads": leads, "objects": arrays.texts(sorted(created))}
    run.execute(_RECORD, values)


def locked_tables(sql_file: Traversable) -> list[str]:
    """Return the names of the existing tables that this file locks, as it lists them."""
    found = _LOCKS.search(sql_file.read_text("utf-8"))
    return found[1].split(", ") if found else []


def installed_version(connection: Connection, schema: str = "outbox") -> int:
    """Return the version of the core's tables; 0 if they are missing. It may be later than SCHEMA_VERSION."""
    return _installed(Executor(connection, schema)).get(CORE, _MISSING).version


def check_schema(connection: Connection, schema: str = "outbox") -> int:
    """Return the version of the core's tables, which this code can use.

    Raises SchemaError when the tables of the core or of an installed part are missing, too old or too new for this
    code. Raises ConfigurationError when the server is too old.
    """
    check_server(connection.info.server_version)
    known = _installed(Executor(connection, schema))
    core = known.get(CORE, _MISSING)
    if core.version == 0:
        raise missing(schema, connection.info.dbname)
    for files in _files():
        installed = known.get(files.name, _MISSING)
        _refuse_newer(schema, files, installed)
        if installed.version < files.version:
            have = f"have version {installed.version}" if installed.version else "are missing"
            raise SchemaError(
                f"{files} {have} in the broker's schema {schema!r}, but this code needs version {files.version} of "
                f"them: run `manage.py migrate --database=ALIAS` with the alias of the broker (outside Django: "
                f"outbox.broker.schema.install.install). Code of the previous version, and without the part, keeps "
                f"working on the new tables."
            )
    return core.version


def missing_parts(connection: Connection, schema: str = "outbox") -> list[str]:
    """Return the installed parts for whose tables `install` would change something."""
    known = _installed(Executor(connection, schema))
    _, *parts = _files()
    return [files.name for files in parts if known.get(files.name, _MISSING).version < files.version]


def check_server(server_version: int) -> None:
    """Raise ConfigurationError if this PostgreSQL version (`server_version_num`, such as 150004) is too old."""
    if server_version < MINIMUM_POSTGRESQL * 10_000:
        raise ConfigurationError(
            f"the broker needs PostgreSQL {MINIMUM_POSTGRESQL} or newer; this server is {server_version // 10_000}."
            f"{server_version % 10_000}: upgrade the server, or use another database for the broker (OUTBOX['BROKER'])."
        )


def missing(schema: str, database: str) -> SchemaError:
    """Return the error for a database without the broker's tables."""
    return SchemaError(
        f"the broker's tables are not installed in schema {schema!r} of the database {database!r}. If this is the "
        f"wrong database, correct the broker's connection (also LISTEN_URL) or the schema setting. Otherwise run "
        f"`manage.py migrate --database=ALIAS` with the alias of the broker (outside Django: "
        f"outbox.broker.schema.install)."
    )


def _refuse_newer(schema: str, files: _Files, installed: _Installed) -> None:
    if installed.minimum_code > files.version:
        raise SchemaError(
            f"{files} in the broker's schema {schema!r} have version {installed.version} and need code of at least "
            f"version {installed.minimum_code}, which is newer than this code ({files.version}): upgrade the package."
        )


_MISSING: Final = _Installed(version=0, minimum_code=0)


def _installed(run: Executor) -> dict[str, _Installed]:
    """Return the installed tables by the names of the core and of all parts."""
    [exists] = run.one(_EXISTS, {"table": f"{run.schema}.schema_version"})
    rows = run.rows(_VERSIONS) if exists else ()
    return {name: _Installed(version, minimum_code) for name, version, minimum_code in rows}


def _plan_next(run: Executor) -> Planned | None:
    """Plan the first missing change; None: no change is missing."""
    known = _installed(run)
    for files in _files():
        installed = known.get(files.name, _MISSING)
        _refuse_newer(run.schema, files, installed)
        if installed.version < files.version:
            return _plan(run, files, installed.version)
    return None


def _plan(run: Executor, files: _Files, reached: int) -> Planned:
    version = min(number for number in files.changes if number > reached) if reached else files.version
    sql_file = files.changes[version] if reached else files.folder.joinpath("current.sql")
    # A new table may refer to one of the core, which locks that one.
    return locked_tables(sql_file), lambda: apply(run, files, version, sql_file)


def _create_functions(run: Executor, files: _Files) -> None:
    folder = files.folder.joinpath("functions")
    if not folder.is_dir():
        return
    before = catalogue.names(run)
    run.execute(_UNCHECKED_BODIES)
    _execute(run, *sorted(folder.iterdir(), key=lambda file: file.name))
    # A function of earlier tables keeps its present rights, because an operator may have granted more.
    for name in sorted(set(grants.GRANTED_ONLY) - before) if files.name == CORE else ():
        function = sql.Identifier(run.schema, name)
        run.connection.execute(sql.SQL("REVOKE ALL ON FUNCTION {} FROM PUBLIC").format(function))


def _execute(run: Executor, *files: Traversable) -> None:
    """Execute files of SQL, with only the schema in search_path."""
    text = "\n".join(file.read_text("utf-8") for file in files)
    [before] = run.one(_GET_SEARCH_PATH)
    run.execute(_SEARCH_PATH)
    # A file has many statements, so it is sent without parameters and in text form.
    run.connection.execute(text.encode())
    run.execute(_SET_SEARCH_PATH, {"path": before})
