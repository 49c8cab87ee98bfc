"""Removing the broker's tables, and nothing that is not the broker's."""

from __future__ import annotations

from typing import Final

from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.schema.install import change_tables, check_schema, recreate
from outbox.errors import SchemaError

_SCRATCH: Final = "outbox_uninstall_scratch"

_NAMES = Statement("""
SELECT relname::text FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace
WHERE nspname = %(name)s AND relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
UNION
SELECT proname::text FROM pg_proc JOIN pg_namespace n ON n.oid = pronamespace WHERE nspname = %(name)s
""")
_CREATE_SCHEMA = Statement("CREATE SCHEMA {schema}")
_DROP = Statement("DROP SCHEMA {schema} CASCADE")


def uninstall(connection: Connection, schema: str = "outbox") -> None:
    """Drop the schema with the broker's tables and all that is in them; what others built on them goes along.

    Raises SchemaError when the tables are not there, are of another version than this code, share the schema with
    something else, or are held by open transactions; then nothing was changed.
    """
    run = Executor(connection, schema)

    def drop() -> None:
        check_schema(connection, schema)
        foreign = sorted(_names(run) - _names_of_a_fresh_one(connection))
        if foreign:
            raise SchemaError(
                f"the schema {schema!r} also holds what is not the broker's ({', '.join(foreign[:5])}): move it to "
                f"another schema first. Nothing was dropped."
            )
        run.execute(_DROP)

    change_tables(run, drop, what="dropped")


def _names_of_a_fresh_one(connection: Connection) -> set[str]:
    """Known by making one beside it, and taking it back."""
    scratch = Executor(connection, _SCRATCH)
    with connection.transaction(force_rollback=True):
        scratch.execute(_CREATE_SCHEMA)
        recreate(scratch)
        return _names(scratch)


def _names(run: Executor) -> set[str]:
    return {name for (name,) in run.rows(_NAMES, {"name": run.schema})}
