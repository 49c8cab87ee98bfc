"""Remove the broker's tables, and nothing else.

`DROP SCHEMA ... CASCADE` would drop foreign objects too, and the schema may be `public`. A list of names would need an
edit with each change of the tables. So the names are read from a second schema, which is installed from the same files
and rolled back. A schema that holds anything else stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.schema.install import (
    DEFAULT_PATIENCE_SECONDS,
    Planned,
    change_tables,
    check_schema,
    create,
)
from outbox.errors import SchemaError

logger = logging.getLogger(__name__)

_SCRATCH: Final = "outbox_uninstall_scratch"

_NAMES = Statement("""
SELECT relname::text FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace
WHERE nspname = %(name)s AND relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
UNION
SELECT proname::text FROM pg_proc JOIN pg_namespace n ON n.oid = pronamespace WHERE nspname = %(name)s
""")
_CREATE_SCHEMA = Statement("CREATE SCHEMA {schema}")
_DROP = Statement("DROP SCHEMA {schema} CASCADE")
_TABLES = Statement("""
SELECT relname::text FROM pg_class
WHERE relnamespace = to_regnamespace(%(name)s) AND relkind IN ('r', 'p')
""")


def uninstall(
    connection: Connection,
    schema: str = "outbox",
    *,
    patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
    report: Callable[[str], None] = logger.warning,
) -> None:
    """Drop the schema with the broker's tables and their contents.

    Views and other objects that depend on these tables are dropped, too.

    Raises SchemaError, and changes nothing, in four cases: the tables are missing; the tables have another version than
    this code; the schema also has objects that are not part of the broker; other transactions used one of the tables at
    each attempt within `patience_seconds`.
    """
    run = Executor(connection, schema)

    own: set[str] = set()

    def drop() -> None:
        run.execute(_DROP)

    def plan() -> Planned[None]:
        check_schema(connection, schema)
        # Read the names once for all attempts, because reading them takes a hundred times as long as all other steps of
        # an attempt.
        own.update(own or _names_of_a_fresh_one(connection))
        foreign = sorted(_names(run) - own)
        if foreign:
            raise SchemaError(
                f"the schema {schema!r} also has objects that are not part of the broker ("
                f"{', '.join(foreign[:5])}). Nothing was dropped. Move these objects to another schema first."
            )
        # Only tables are locked, because a transaction that uses a view or a sequence also uses a table.
        tables = [name for (name,) in run.rows(_TABLES, {"name": schema})]
        return Planned(tables, drop)

    change_tables(run, plan, what="dropped", patience_seconds=patience_seconds, report=report)


def _names_of_a_fresh_one(connection: Connection) -> set[str]:
    """Install the tables in a scratch schema, list their names, and roll back."""
    scratch = Executor(connection, _SCRATCH)
    with connection.transaction(force_rollback=True):
        scratch.execute(_CREATE_SCHEMA)
        create(scratch)
        return _names(scratch)


def _names(run: Executor) -> set[str]:
    return {name for (name,) in run.rows(_NAMES, {"name": run.schema})}
