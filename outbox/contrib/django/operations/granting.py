"""The four roles in the databases of a project: `outbox_install --grants`, and the rights that `outbox_doctor` checks.

The broker's schema has its part in outbox/broker/schema/grants.py. The application's databases have the tables of
`outbox.contrib.django`, whose owner is the role that runs `migrate`. The application's own tables are not touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from django.apps import apps
from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox import hooks
from outbox.broker.database.executor import Executor
from outbox.broker.operations.conditions import Condition, Severity, of_check, of_text
from outbox.broker.operations.diagnosis import direct_grants
from outbox.broker.schema import grants
from outbox.broker.schema.grants import Logins, MissingRight, Role, role_name
from outbox.broker.schema.install import DEFAULT_PATIENCE_SECONDS, check_schema, give_rights
from outbox.contrib.django.database.aliases import broker_database
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.settings.conf import OutboxSettings, get_settings

# The rights of a publisher in the application's databases.
_OF_PUBLISHERS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "outbox_ledger": {"SELECT": (), "INSERT": ()},
    "outbox_ledger_identity": {"SELECT": ()},
    "outbox_key_lock": {"SELECT": (), "INSERT": (), "UPDATE": ()},
}
_OF_OTHERS: Final[Mapping[Role, Sequence[str]]] = {
    Role.WORK: ("SELECT", "INSERT", "UPDATE", "DELETE"),
    Role.WATCH: ("SELECT",),
}


def planned_grants(settings: OutboxSettings, members: Mapping[Role, Sequence[str]]) -> list[tuple[str, list[str]]]:
    """Return the statements that `grant` would execute, with the alias of the database; those of the broker first."""
    with broker_database(settings).connect_as_owner() as connection:
        check_schema(connection, settings.schema)
        group = settings.required_producer_group() if members.get(Role.PUBLISH) else None
        run = Executor(connection, settings.schema)
        found = [(settings.broker, grants.plan(run, Logins(members, producer_group=group)))]
    for alias in _application_aliases():
        application = connections[alias]
        statements = [*_roles(application, settings.schema), *_rights(application, settings.schema)]
        statements += [
            grants.text_of("GRANT {} TO {}", role_name(settings.schema, role), member)
            for role, given in members.items()
            if role is not Role.OWN
            for member in given
        ]
        found.append((alias, statements))
    return found


def grant(
    settings: OutboxSettings,
    members: Mapping[Role, Sequence[str]],
    *,
    patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
) -> list[tuple[str, list[str]]]:
    """Make the roles, give them their rights, and make the logins members. Returns the executed statements.

    Each database is changed in one transaction. A second call changes nothing. Raises psycopg.Error or
    django.db.Error if the connected role may not do this.
    """
    planned = planned_grants(settings, members)
    with broker_database(settings).connect_as_owner() as connection:
        [(_, of_broker), *of_applications] = planned
        give_rights(Executor(connection, settings.schema), of_broker, patience_seconds=patience_seconds)
    for alias, statements in of_applications:
        _execute(connections[alias], statements)
    return planned


def renew(alias: str) -> None:
    """After a migration of an application database, give the roles their rights again, if they have rights there."""
    connection, schema = connections[alias], get_settings().schema
    if connection.vendor == "postgresql" and alias in _application_aliases() and _is_used(connection, schema):
        _execute(connection, _rights(connection, schema))


def _application_aliases() -> list[str]:
    return [alias for alias in ledger_aliases() if connections[alias].vendor == "postgresql"]


def _execute(connection: BaseDatabaseWrapper, statements: Iterable[str]) -> None:
    with connection.cursor() as cursor:
        cursor.execute(";\n".join(statements))


_TABLES: Final = """
SELECT relname FROM pg_class WHERE oid = ANY (SELECT to_regclass(name) FROM unnest(%s::text[]) AS name)
"""


def _tables(connection: BaseDatabaseWrapper) -> list[str]:
    own = [app for app in apps.get_app_configs() if app.label == "outbox" or app.label in hooks.tables]
    models = [model for app in own for model in app.get_models()]
    names = [model._meta.db_table for model in models if router.allow_migrate_model(connection.alias, model)]
    with connection.cursor() as cursor:
        cursor.execute(_TABLES, [names])
        return sorted(name for (name,) in cursor.fetchall())


def _roles(connection: BaseDatabaseWrapper, schema: str) -> Iterator[str]:
    """Yield the statements that make the missing roles. The application's database may be on another server."""
    with connection.cursor() as cursor:
        for role in (Role.PUBLISH, Role.WORK, Role.WATCH):
            name = role_name(schema, role)
            cursor.execute("SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = %s)", [name])
            if not cursor.fetchone()[0]:
                yield grants.create_role(name)


def _is_used(connection: BaseDatabaseWrapper, schema: str) -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(has_table_privilege(to_regrole(quote_ident(%s)), to_regclass('outbox_ledger'), 'INSERT'),"
            " false)",
            [role_name(schema, Role.WORK)],
        )
        return bool(cursor.fetchone()[0])


def _rights(connection: BaseDatabaseWrapper, schema: str) -> Iterator[str]:
    for role, table, right, columns in _needed(_tables(connection)):
        to = role_name(schema, role)
        yield grants.text_of(f"GRANT {right}{{}} ON {{}} TO {{}}", grants.in_brackets(columns), table, to)


def _needed(tables: Sequence[str]) -> Iterator[tuple[Role, str, str, Sequence[str]]]:
    of_publishers = {**_OF_PUBLISHERS, **{name: of for its in hooks.tables.values() for name, of in its.rights.items()}}
    for table in tables:
        for right, columns in of_publishers.get(table, {}).items():
            yield Role.PUBLISH, table, right, columns
        for role, rights in _OF_OTHERS.items():
            yield role, table, ", ".join(rights), ()


# ---------------------------------------------------------------------------------------------------------------------
# The part of the doctor.

# The rights of the role on these tables, apart from those in the second array.
_HELD: Final = """
SELECT quote_ident(relname), string_agg("right", ', ' ORDER BY place), quote_ident(current_user)
FROM pg_class
CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) WITH ORDINALITY AS every ("right", place)
WHERE pg_class.oid = ANY (SELECT to_regclass(name) FROM unnest(%s::text[]) AS name)
  AND has_table_privilege(pg_class.oid, "right") AND relname || ' ' || "right" <> ALL (%s::text[])
GROUP BY relname
ORDER BY relname
"""


def check_rights(run: Executor, role: Role) -> Iterator[Condition]:
    """Yield one result per database: whether the connected role has the rights of `role`, and what grants the others.

    For `publish`, also whether it has rights that a publisher must not have.
    """
    settings = get_settings()
    group = settings.producer_group if role is Role.PUBLISH else None
    yield _complete(f"rights to {role}", grants.missing_rights(run, role, producer_group=group))
    if role is Role.PUBLISH and (held := grants.excess_rights(run)):
        yield of_text(
            "rights beyond publish",
            Severity.WARNING,
            f"the role can read bodies or decide transactions: {', '.join(held)}",
            "Connect the web process as a role that is a member of no other role than publish, or revoke these rights.",
        )
    if role is Role.WORK:
        yield from direct_grants(broker_database(settings))
    for alias in _application_aliases():
        missing = _missing(connections[alias], role, settings.schema)
        yield _complete(f"rights to {role} on {alias!r}", missing)
        if role is Role.PUBLISH:
            yield from _beyond_publish(connections[alias])


def _missing(connection: BaseDatabaseWrapper, role: Role, schema: str) -> list[MissingRight]:
    tables = _tables(connection)
    needed = [
        ("TABLE", table, right, " ".join(columns))
        for of, table, rights, columns in _needed(tables)
        if of is role
        for right in rights.split(", ")
    ]
    owned = [("OWNED", table, "USAGE", "") for table in tables] if role is Role.OWN else []
    connection.ensure_connection()
    with connection.wrap_database_errors:
        # The login that migrates owns these tables itself, together with the application's own.
        to = None if role is Role.OWN else role
        return grants.lacking(Executor(connection.connection, schema), [*needed, *owned], to)


def _beyond_publish(connection: BaseDatabaseWrapper) -> Iterator[Condition]:
    """Yield a warning if the connected role may do more with the tables of outbox than a publisher must.

    `GRANT … ON ALL TABLES` and default privileges give such rights, also on tables that a later migration creates.
    """
    tables = _tables(connection)
    needed = [f"{table} {right}" for of, table, right, columns in _needed(tables) if of is Role.PUBLISH and not columns]
    with connection.cursor() as cursor:
        cursor.execute(_HELD, [tables, needed])
        held = cursor.fetchall()
    if held:
        yield of_text(
            f"rights beyond publish on {connection.alias!r}",
            Severity.WARNING,
            f"a publisher does not need {'; '.join(f'{rights} on {table}' for table, rights, _ in held)}",
            "Connect the web process as a member of publish alone, or execute as the owner of the tables: "
            + "; ".join(f"REVOKE {rights} ON {table} FROM {user}" for table, rights, user in held)
            + ";",
        )


def _complete(name: str, missing: Sequence[MissingRight]) -> Condition:
    text = "missing: " + "; ".join(f"{one.right} on {one.subject}" for one in missing) if missing else "complete"
    return of_check(name, not missing, text, grants.remedy(missing))
