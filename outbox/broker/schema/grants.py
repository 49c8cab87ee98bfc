"""The four database roles of the broker's schema, and their rights: publish, work, watch, own.

Each role is a role of the server without a login, such as `outbox_publish` for the schema `outbox`; logins are members.
`plan` returns the SQL that makes the roles and gives them their rights. `renew` executes it again after a change of the
tables, so that a new table has its rights in the transaction that creates it. `missing_rights` compares the rights of
the connected role with the rights that it needs.

See decision 235.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.schema.catalogue import SchemaObject, objects


class Role(enum.StrEnum):
    """A set of rights for one kind of process."""

    PUBLISH = "publish"
    """Web processes: they publish and report ends for their producer groups. They read no body and no table of work."""
    WORK = "work"
    """Workers, and commands that change messages or groups."""
    WATCH = "watch"
    """Readers: status, metrics, the operations page without its actions, reconciliation."""
    OWN = "own"
    """Installations and upgrades: the role owns the tables."""


def role_name(schema: str, role: Role) -> str:
    return f"{schema}_{role}"


# The functions through which a publisher writes. They run with the rights of their owner.
PUBLISHING: Final = (
    "append_batch",
    "append_one",
    "make_checks_due",
    "publish",
    "publish_bytes",
    "record_end",
    "stored_messages",
    "uncounted_messages",
)
# Functions that only functions with the rights of their owner call.
_INNER: Final = ("key_lock_number", "key_shard", "may_publish_for", "publish_complaint", "refuse_undeliverable")
# By default, PostgreSQL lets every role execute a new function. So the installation revokes this right. It does not for
# uncounted_messages, which only returns a number: a role with rights on the tables alone can still read the status.
GRANTED_ONLY: Final = (*(name for name in PUBLISHING if name != "uncounted_messages"), *_INNER)
# A function with the rights of its owner that the status calls.
_READING: Final = ("uncounted_messages",)
# Workers do not publish from SQL.
_NOT_OF_WORKERS: Final = ("publish", "publish_bytes", *_INNER)

# The rights of a publisher on tables, by column where a table has more than the publisher may read. None has a body.
_OF_PUBLISHERS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "broker": {"SELECT": ()},
    "schema_version": {"SELECT": ()},
    "topic": {"SELECT": ()},
    "publisher": {"SELECT": ()},
    # The last statement of a block reads its own decision again.
    "op_log": {"SELECT": ("transaction_id", "decision")},
    # The note of a process that cannot publish.
    "incident": {"INSERT": ("kind", "subject", "detail"), "SELECT": ("incident_id",)},
}
# Only the owner changes these: what a worker could change here, it would be allowed afterwards.
_READ_ONLY: Final = ("publisher", "schema_version")
_WRITES: Final = ("SELECT", "INSERT", "UPDATE", "DELETE")

_STATE: Final = Statement("""
SELECT current_user::text AS user, (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) AS is_superuser,
       ARRAY(SELECT rolname::text FROM pg_roles WHERE rolname = ANY (%(roles)s)) AS existing,
       (SELECT pg_get_userbyid(nspowner)::text FROM pg_namespace WHERE nspname = %(schema)s) AS schema_owner,
       ARRAY(SELECT rolname::text FROM pg_roles
             WHERE rolname = ANY (%(roles)s) AND has_schema_privilege(rolname, to_regnamespace(%(schema)s), 'USAGE'))
           AS used,
       pg_has_role(current_user, coalesce(to_regrole(quote_ident(%(own)s)), 0::oid), 'USAGE') AS owns,
       (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
           OR pg_has_role(current_user, 'pg_read_all_stats', 'USAGE WITH ADMIN OPTION') AS may_show_sessions
""")
_SEES_SESSIONS: Final = Statement("SELECT pg_has_role(to_regrole(quote_ident(%(role)s)), 'pg_read_all_stats', 'USAGE')")


@dataclass(frozen=True, slots=True)
class _State:
    """What the server and the schema have now. `used`: the roles that may use the schema.

    `owns`: the connected role has the rights of the role own. `may_show_sessions`: it may grant pg_read_all_stats.
    """

    user: str
    is_superuser: bool
    existing: list[str]
    schema_owner: str | None
    used: list[str]
    owns: bool
    may_show_sessions: bool


@dataclass(frozen=True, slots=True)
class Logins:
    """The logins that become members of the four roles; those of `publish` may publish for `producer_group`."""

    members: Mapping[Role, Sequence[str]]
    producer_group: str | None = None


def _state(run: Executor) -> _State:
    names = [role_name(run.schema, role) for role in Role]
    values = {"roles": names, "schema": run.schema, "own": role_name(run.schema, Role.OWN)}
    return run.objects(_State, _STATE, values)[0]


def plan(run: Executor, logins: Logins) -> list[str]:
    """Return the SQL statements that make the roles, give them their rights, and make the logins members."""
    state = _state(run)
    names = {role: role_name(run.schema, role) for role in Role}
    found = [create_role(name) for name in names.values() if name not in state.existing]
    if not state.owns and not state.is_superuser:
        found.append(text_of("GRANT {} TO {}", names[Role.OWN], state.user))
    found += _rights(run, state)
    for role in (Role.WORK, Role.WATCH):
        if names[role] not in state.existing or not run.one(_SEES_SESSIONS, {"role": names[role]})[0]:
            # A comment, so that the other rights are granted by a role that may not grant this one.
            prefix = "" if state.may_show_sessions else "-- a superuser has to execute: "
            found.append(prefix + text_of("GRANT pg_read_all_stats TO {}", names[role]))
    for role, members in logins.members.items():
        found += [text_of("GRANT {} TO {}", names[role], member) for member in members]
    if logins.producer_group is not None:
        insert = "INSERT INTO {}.publisher (role, producer_group) VALUES ({}, {}) ON CONFLICT DO NOTHING"
        found += [
            text_of(insert, run.schema, sql.Literal(member), sql.Literal(logins.producer_group))
            for member in logins.members.get(Role.PUBLISH, ())
        ]
    return found


def create_role(name: str) -> str:
    """Return the statement that makes a role of the server, if it does not exist yet.

    The statements for two databases of one server are made before the first of them is executed.
    """
    return text_of("DO $$ BEGIN CREATE ROLE {} NOLOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$", name)


def tables_to_own(run: Executor) -> list[str]:
    """Return the tables that `plan` would give to the role own, which locks them."""
    own = role_name(run.schema, Role.OWN)
    return [one.name for one in objects(run) if one.kind == "TABLE" and one.owner != own]


def renew(run: Executor) -> None:
    """Give the rights again, if the four roles use this schema. Call it in the transaction that has changed the schema.

    Without it, an upgrade would create a table that the worker may not use.
    """
    state = _state(run)
    if set(state.used) >= {role_name(run.schema, role) for role in Role if role is not Role.OWN}:
        for statement in _rights(run, state):
            run.connection.execute(statement.encode())


def _rights(run: Executor, state: _State) -> Iterator[str]:
    """Yield the statements that give the roles their rights on what is installed."""
    schema, installed = run.schema, objects(run)
    publish, work, watch, own = (role_name(schema, role) for role in Role)
    if state.schema_owner != own:
        yield text_of("ALTER SCHEMA {} OWNER TO {}", schema, own)
    for one in installed:
        if one.owner not in (None, own):
            yield text_of(f"ALTER {one.kind} {{}}.{{}} OWNER TO {{}}", schema, sql.SQL(one.identity), own)
    yield text_of("GRANT USAGE ON SCHEMA {} TO {}, {}, {}", schema, publish, work, watch)
    yield text_of("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {} TO {}", schema, work)
    for table in _READ_ONLY:
        yield text_of("REVOKE INSERT, UPDATE, DELETE ON {}.{} FROM {}", schema, table, work)
    yield text_of("GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA {} TO {}", schema, work)
    yield text_of("GRANT SELECT ON ALL TABLES IN SCHEMA {} TO {}", schema, watch)
    yield text_of("GRANT SELECT ON ALL SEQUENCES IN SCHEMA {} TO {}", schema, watch)
    for table, rights in _OF_PUBLISHERS.items():
        for right, columns in rights.items():
            yield text_of(f"GRANT {right}{{}} ON {{}}.{{}} TO {{}}", in_brackets(columns), schema, table, publish)
    for one in installed:
        if one.kind == "FUNCTION":
            function = sql.SQL(one.identity)
            if one.name in GRANTED_ONLY:
                yield text_of("REVOKE EXECUTE ON FUNCTION {}.{} FROM PUBLIC", schema, function)
            roles = [work, *([publish] if one.name in PUBLISHING else []), *([watch] if one.name in _READING else [])]
            to = sql.SQL(", ").join(map(sql.Identifier, roles))
            yield text_of("GRANT EXECUTE ON FUNCTION {}.{} TO {}", schema, function, to)


def in_brackets(columns: Sequence[str]) -> sql.Composable:
    """Return the columns of a GRANT; empty for the whole table."""
    return sql.SQL(" ({})").format(sql.SQL(", ").join(map(sql.Identifier, columns))) if columns else sql.SQL("")


def text_of(template: str, *values: str | sql.Composable) -> str:
    """Return a statement; a value that is a text is an identifier."""
    named = [sql.Identifier(value) if isinstance(value, str) else value for value in values]
    return sql.SQL(template).format(*named).as_string(None)


# ---------------------------------------------------------------------------------------------------------------------
# The rights of the connected role.


@dataclass(frozen=True, slots=True)
class MissingRight:
    """A right that the connected role needs and does not have, and the statement that grants it."""

    subject: str
    right: str
    remedy: str


# The rights in the arrays that the role does not have. `columns`: '' for the whole object.
_MISSING: Final = Statement("""
SELECT kind, name, "right", columns
FROM unnest(%(kinds)s::text[], %(names)s::text[], %(rights)s::text[], %(columns)s::text[])
     WITH ORDINALITY AS needed (kind, name, "right", columns, place)
WHERE NOT coalesce(CASE
    WHEN kind = 'SCHEMA' THEN has_schema_privilege(name, "right")
    WHEN kind = 'SEQUENCE' THEN has_sequence_privilege(name, "right")
    WHEN kind = 'FUNCTION' THEN has_function_privilege(name, "right")
    WHEN kind = 'OWNED' THEN pg_has_role((SELECT relowner FROM pg_class WHERE oid = to_regclass(name)), "right")
    WHEN columns = '' THEN has_table_privilege(name, "right")
    ELSE (SELECT bool_and(has_column_privilege(name, one, "right")) FROM unnest(string_to_array(columns, ' ')) AS one)
END, false)
ORDER BY place
""")
_USER: Final = Statement("SELECT current_user::text, has_schema_privilege(%(schema)s, 'USAGE')")
_GRANTEE: Final = Statement("""
SELECT CASE WHEN pg_has_role(to_regrole(quote_ident(%(role)s::text)), 'USAGE') THEN %(role)s::text
            ELSE current_user::text END
""")
_IS_MEMBER: Final = Statement("SELECT coalesce(pg_has_role(to_regrole(quote_ident(%(role)s)), 'USAGE'), false)")
_MAY_PUBLISH: Final = Statement("""
SELECT has_table_privilege('{schema}.op_log', 'INSERT')
       OR EXISTS (SELECT FROM {schema}.publisher
                  WHERE producer_group = %(group)s AND pg_has_role(to_regrole(quote_ident(role)), 'USAGE'))
""")
# Rights that let a publisher read bodies, or decide transactions.
_TOO_MANY: Final = Statement("""
SELECT name || ' ' || "right"
FROM (VALUES ('commit_log', 'body', 'SELECT'), ('commit_log', 'body', 'INSERT'), ('message_v1', 'body', 'SELECT'),
             ('op_log', 'decision', 'INSERT'), ('op_log', 'decision', 'UPDATE'), ('pending_check', 'due_at', 'UPDATE'))
     AS held (name, "column", "right")
WHERE has_column_privilege('{schema}.' || name, "column", "right")
""")

# Kind, name, right and columns.
_Needed = tuple[str, str, str, str]


def needed_rights(installed: Sequence[SchemaObject], schema: str, role: Role) -> Iterator[_Needed]:
    """Yield the rights that the role needs on the installed objects."""
    yield "SCHEMA", schema, "USAGE", ""
    for one in installed:
        identity = f"{schema}.{one.identity}"
        if role is Role.OWN:
            if one.kind == "TABLE":
                yield "OWNED", identity, "USAGE", ""
        elif one.kind == "FUNCTION":
            if (
                (role is Role.PUBLISH and one.name in PUBLISHING)
                or (role is Role.WORK and one.name not in _NOT_OF_WORKERS)
                or (role is Role.WATCH and one.name in _READING)
            ):
                yield "FUNCTION", identity, "EXECUTE", ""
        elif role is Role.PUBLISH:
            for right, columns in _OF_PUBLISHERS.get(one.name, {}).items():
                yield one.kind, identity, right, " ".join(columns)
        elif role is Role.WORK and one.kind == "TABLE" and one.name not in _READ_ONLY:
            for right in _WRITES:
                yield one.kind, identity, right, ""
        else:
            yield one.kind, identity, "SELECT", ""


def missing_rights(run: Executor, role: Role, *, producer_group: str | None = None) -> list[MissingRight]:
    """Return the rights that the connected role needs for `role` and does not have; of a publisher also its group."""
    user, may_use = run.one(_USER, {"schema": run.schema})
    if not may_use:
        remedy = f"GRANT USAGE ON SCHEMA {run.schema} TO {grantee(run, role)}"
        return [MissingRight(f"schema {run.schema}", "USAGE", remedy)]
    found = lacking(run, list(needed_rights(objects(run), run.schema, role)), role)
    # The look-up of the group needs the rights above.
    if role is Role.PUBLISH and producer_group is not None and not found:
        [may] = run.one(_MAY_PUBLISH, {"group": producer_group})
        if not may:
            values = f"({sql.Literal(user).as_string(None)}, {sql.Literal(producer_group).as_string(None)})"
            insert = f"INSERT INTO {run.schema}.publisher (role, producer_group) VALUES {values}"
            found.append(MissingRight(f"producer group {producer_group!r}", "publish", insert))
    return found


def lacking(run: Executor, needed: Sequence[_Needed], role: Role | None) -> list[MissingRight]:
    """Return those of the rights that the connected role does not have; None: the remedies name only its login."""
    names = ("kinds", "names", "rights", "columns")
    parameters = {name: [one[place] for one in needed] for place, name in enumerate(names)}
    to = grantee(run, role)
    return [_missing(to, *right) for right in run.rows(_MISSING, parameters)]


def grantee(run: Executor, role: Role | None) -> str:
    """Return to whom a missing right is granted: to `role` if the connected role is its member, else to this login.

    A login with a right of its own would keep it after it has left the role, and the role's next login would lack it.
    """
    name = role_name(run.schema, role) if role else None
    return text_of("{}", run.one(_GRANTEE, {"role": name})[0])


def _missing(to: str, kind: str, name: str, right: str, columns: str) -> MissingRight:
    if kind == "OWNED":
        return MissingRight(f"table {name}", "ownership", f"ALTER TABLE {name} OWNER TO {to}")
    of = f" ({', '.join(columns.split())})" if columns else ""
    word = "" if kind in ("TABLE", "VIEW") else f"{kind} "
    return MissingRight(f"{kind.lower()} {name}", f"{right}{of}", f"GRANT {right}{of} ON {word}{name} TO {to}")


def remedy(missing: Sequence[MissingRight]) -> str:
    """Return the next step that grants all of the rights."""
    return "Execute as the owner of the tables: " + "; ".join(one.remedy for one in missing) + ";"


def lesser_role(run: Executor) -> Role | None:
    """Return watch or publish if the connected role is a member of it and cannot work; else None."""
    if not missing_rights(run, Role.WORK):
        return None
    role = membership(run)
    return role if role in (Role.WATCH, Role.PUBLISH) else None


def membership(run: Executor) -> Role | None:
    """Return the first of own, work, watch and publish of which the connected role is a member; None if of none."""
    for role in (Role.OWN, Role.WORK, Role.WATCH, Role.PUBLISH):
        [is_member] = run.one(_IS_MEMBER, {"role": role_name(run.schema, role)})
        if is_member:
            return role
    return None


def is_used(run: Executor, role: Role) -> bool:
    """Return whether `role` exists on the server, and may use this schema."""
    return role_name(run.schema, role) in _state(run).used


def excess_rights(run: Executor) -> list[str]:
    """Return the rights of the connected role that a publisher must not have: to read bodies, and to decide."""
    return [text for (text,) in run.rows(_TOO_MANY)]
