"""What a schema contains: its tables, views, sequences and functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

# The sequence of an identity column has no owner of its own, because it always has the owner of its table.
_OBJECTS: Final = Statement("""
SELECT CASE relkind WHEN 'S' THEN 'SEQUENCE' WHEN 'v' THEN 'VIEW' WHEN 'm' THEN 'MATERIALIZED VIEW'
                    WHEN 'f' THEN 'FOREIGN TABLE' ELSE 'TABLE' END AS kind,
       relname::text AS name, quote_ident(relname) AS identity,
       CASE WHEN NOT EXISTS (SELECT FROM pg_depend WHERE relkind = 'S' AND objid = pg_class.oid AND deptype = 'i')
            THEN pg_get_userbyid(relowner)::text END AS owner
FROM pg_class
WHERE relnamespace = to_regnamespace(%(schema)s) AND relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
UNION ALL
SELECT 'FUNCTION', proname::text, quote_ident(proname) || '(' || oidvectortypes(proargtypes) || ')',
       pg_get_userbyid(proowner)::text
FROM pg_proc WHERE pronamespace = to_regnamespace(%(schema)s)
ORDER BY 1, 3
""")


@dataclass(frozen=True, slots=True)
class SchemaObject:
    """A table, view, sequence or function. `identity`: its name for SQL, without the schema."""

    kind: str
    name: str
    identity: str
    owner: str | None


def objects(run: Executor) -> list[SchemaObject]:
    """Return all objects of the schema, in the order of their kinds and identities."""
    return run.objects(SchemaObject, _OBJECTS, {"schema": run.schema})


def names(run: Executor) -> set[str]:
    """Return the names of all objects of the schema."""
    return {one.name for one in objects(run)}
