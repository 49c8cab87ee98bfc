"""Remove the broker's tables or those of one part, and nothing else.

`DROP SCHEMA ... CASCADE` would drop foreign objects too, and the schema may be `public`. So each installation records
the names of what it creates (table `schema_version`), also for parts that this process lacks. A schema that holds
anything else stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from outbox import hooks
from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.schema.catalogue import SchemaObject, objects
from outbox.broker.schema.install import CORE, DEFAULT_PATIENCE_SECONDS, Planned, change_tables, check_schema
from outbox.errors import SchemaError, UsageError

logger = logging.getLogger(__name__)

_DROP = Statement("DROP SCHEMA {schema} CASCADE")
_NAMES = Statement("SELECT DISTINCT unnest(objects) FROM {schema}.schema_version")


def uninstall(
    connection: Connection,
    schema: str = "outbox",
    *,
    patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
    report: Callable[[str], None] = logger.warning,
) -> None:
    """Drop the schema with the broker's tables, and all that depends on them.

    Raises SchemaError, and changes nothing, if the tables are missing or have another version than this code, if the
    schema has other objects, or if other transactions use the tables for `patience_seconds`.
    """
    run = Executor(connection, schema)

    def plan() -> Planned:
        check_schema(connection, schema)
        found = objects(run)
        foreign = sorted({one.name for one in found} - {name for (name,) in run.rows(_NAMES)})
        if foreign:
            raise SchemaError(
                f"the schema {schema!r} also has objects that are not part of the broker ("
                f"{', '.join(foreign[:5])}). Nothing was dropped. Move these objects to another schema first."
            )
        # Only tables are locked, because a transaction that uses a view or a sequence also uses a table.
        return [one.name for one in found if one.kind == "TABLE"], lambda: run.execute(_DROP)

    change_tables(run, plan, what="dropped", patience_seconds=patience_seconds, report=report)


# ---------------------------------------------------------------------------------------------------------------------
# One part.

_RECORDED = Statement("SELECT objects FROM {schema}.schema_version WHERE name = %(part)s")
_FORGET = Statement("DELETE FROM {schema}.schema_version WHERE name = %(part)s")


def rows_of_part(connection: Connection, part: str, schema: str = "outbox") -> dict[str, int]:
    """Return how many rows each table of a part has, without the empty tables.

    Raises UsageError if this process has the part, or if no service has installed it.
    """
    run = Executor(connection, schema)
    counts = {}
    for one in _objects_of_part(run, part):
        if one.kind == "TABLE":
            [counts[one.name]] = run.one(Statement(f"SELECT count(*) FROM {{schema}}.{one.identity}"))
    return {name: count for name, count in counts.items() if count}


def drop_part(
    connection: Connection,
    part: str,
    schema: str = "outbox",
    *,
    patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
    report: Callable[[str], None] = logger.warning,
) -> None:
    """Drop the tables, views and functions of a part with their contents, for all services on this broker.

    Raises UsageError as `rows_of_part`, and SchemaError as `uninstall` if other transactions use the tables.
    """
    run = Executor(connection, schema)

    def plan() -> Planned:
        found = _objects_of_part(run, part)

        def drop() -> None:
            for one in found:
                run.connection.execute(f"DROP {one.kind} IF EXISTS {run.schema}.{one.identity} CASCADE".encode())
            run.execute(_FORGET, {"part": part})

        return [one.name for one in found if one.kind == "TABLE"], drop

    change_tables(run, plan, what="dropped", patience_seconds=patience_seconds, report=report)


def _objects_of_part(run: Executor, part: str) -> list[SchemaObject]:
    """Return what a part has created, without the sequences, which belong to its tables."""
    if part in hooks.schemas:
        raise UsageError(
            f"this project has the part {part!r}, so the next `migrate` would create its tables again. Nothing was "
            "dropped. First remove its app from INSTALLED_APPS, here and in each other service on this broker."
        )
    recorded = None if part == CORE else run.row(_RECORDED, {"part": part})
    if recorded is None:
        raise UsageError(f"no part {part!r} has tables in schema {run.schema!r}. Nothing was dropped.")
    return [one for one in objects(run) if one.name in recorded[0] and one.kind != "SEQUENCE"]
