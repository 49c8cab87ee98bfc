"""The broker's part of the doctor: find faults of server, role and declarations before they cause a failure."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Final

import psycopg
from psycopg.errors import InvalidSchemaName

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.operations import sessions
from outbox.broker.operations.conditions import Condition, Severity, of_check, of_text
from outbox.broker.schema import grants, key_index
from outbox.errors import BrokerUnavailable

LEAST_VERSION: Final = 150000
CLOCK_SECONDS: Final = 2.0


_SETTINGS: Final = Statement("""
SELECT name, current_setting(name) FROM unnest(ARRAY['server_version_num', 'fsync', 'full_page_writes',
    'synchronous_commit', 'autovacuum', 'default_transaction_isolation']) AS name
""")

# The settings of roles and databases that apply to this session.
_TIMEOUTS: Final = Statement("""
SELECT coalesce(role.rolname, 'every role'), coalesce(datname, 'every database'), setting
FROM pg_db_role_setting
LEFT JOIN pg_roles role ON role.oid = setrole
LEFT JOIN pg_database ON pg_database.oid = setdatabase
CROSS JOIN LATERAL unnest(setconfig) AS setting
WHERE (setrole = 0 OR role.rolname = current_user) AND (setdatabase = 0 OR datname = current_database())
  AND split_part(setting, '=', 1) IN ('statement_timeout', 'lock_timeout', 'transaction_timeout',
      'idle_in_transaction_session_timeout', 'idle_session_timeout') AND split_part(setting, '=', 2) NOT IN ('0', '')
ORDER BY 3
""")

_ROLE: Final = Statement("SELECT quote_ident(current_user), quote_ident(%(schema)s)")
_SEES_SESSIONS: Final = Statement("SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')")
_CLOCK: Final = Statement("SELECT extract(epoch FROM clock_timestamp())::double precision")

_TOPICS: Final = Statement("""
SELECT name FROM {schema}.topic
WHERE retry_of IS NULL AND deleted_at IS NULL
  AND NOT EXISTS (SELECT FROM {schema}.subscription WHERE subscription.topic_id = topic.topic_id)
ORDER BY name
""")


def diagnose(run: Executor, database: BrokerDatabase) -> Iterator[Condition]:
    """Run all checks, on an autocommit connection to `database`, whose tables must be installed."""
    # A login that only watches never listens, and must not connect as a worker does.
    listens = grants.lesser_role(run) is not grants.Role.WATCH
    yield from _server(run)
    if listens:
        yield _pooler(run, database)
    yield _clock(run)
    yield _timeouts(run)
    yield _grants(run)
    if listens:
        yield from direct_grants(database)
    yield _sees_sessions(run)
    yield from _declared(run)


def _server(run: Executor) -> Iterator[Condition]:
    found: dict[str, str] = dict(run.rows(_SETTINGS))
    version = int(found["server_version_num"])
    yield of_check(
        "PostgreSQL version", version >= LEAST_VERSION, f"{version // 10000}", "Upgrade to PostgreSQL 15 or newer."
    )
    for name, remedy in (
        ("fsync", "Turn fsync on: without it, a crash of the server loses committed messages."),
        ("full_page_writes", "Turn full_page_writes on: without it, a crash of the server can corrupt the tables."),
    ):
        yield of_check(name, found[name] == "on", found[name], remedy)
    durable = found["synchronous_commit"] != "off"
    remedy = (
        "Set synchronous_commit to on for the roles that publish and consume: if it is off, a crash of the server "
        "loses messages that outbox has acknowledged."
    )
    yield of_check("synchronous_commit", durable, found["synchronous_commit"], remedy)
    level = found["default_transaction_isolation"]
    remedy = (
        "Set default_transaction_isolation to read committed for the broker's role: with a stricter level, publishing "
        "fails with serialisation errors."
    )
    yield of_check("isolation", level == "read committed", level, remedy, Severity.WARNING)
    remedy = "Turn autovacuum on: only vacuum removes the dead rows that retention leaves."
    yield of_check("autovacuum", found["autovacuum"] == "on", found["autovacuum"], remedy, Severity.WARNING)


def _pooler(run: Executor, database: BrokerDatabase) -> Condition:
    if database.listen_conninfo:
        return _listen_url(database)
    if not sessions.is_behind_pooler(run):
        return of_text("pooler", Severity.OK, "none in between")
    remedy = (
        "Set OUTBOX['LISTEN_URL'] to a direct URL, so that workers need not poll. If workers may poll, set "
        "OUTBOX['LISTEN_URL'] to ''."
    )
    text = "the connection goes through a pooler, so workers poll"
    return of_check("pooler", database.listen_conninfo is not None, text, remedy, Severity.WARNING)


def _listen_url(database: BrokerDatabase) -> Condition:
    try:
        with contextlib.closing(database.open(name="outbox-doctor", direct=True)) as connection:
            leads_straight = connection.is_direct
    except BrokerUnavailable as error:
        remedy = "Correct OUTBOX['LISTEN_URL']: workers need this connection to sequence and to consume."
        return of_text("pooler", Severity.CRITICAL, f"LISTEN_URL leads nowhere: {error}", remedy)
    text = "LISTEN_URL leads to the server without a pooler" if leads_straight else "LISTEN_URL leads through a pooler"
    remedy = "Set OUTBOX['LISTEN_URL'] to a URL of the server itself: through a pooler, workers must poll."
    return of_check("pooler", leads_straight, text, remedy, Severity.WARNING)


def _clock(run: Executor) -> Condition:
    before = time.time()
    [there] = run.one(_CLOCK)
    skew = there - (before + time.time()) / 2
    remedy = "Synchronise the clocks of this machine and the server (NTP): ids, delays and ages use both clocks."
    return of_check("clock", abs(skew) < CLOCK_SECONDS, f"{skew:+.3f} s from here", remedy, Severity.WARNING)


def _timeouts(run: Executor) -> Condition:
    found = [f"{setting} ({role}, {database})" for role, database, setting in run.rows(_TIMEOUTS)]
    remedy = (
        "These timeouts apply to publish calls and handlers, not to the broker itself. Make sure that no handler "
        "needs more time than these timeouts allow."
    )
    return of_check("timeouts of roles", not found, ", ".join(found) or "none", remedy, Severity.WARNING)


def _grants(run: Executor, subject: str = "grants", *, is_for_workers: bool = False) -> Condition:
    """Check the grants of this connection's role. Without `is_for_workers`, it may also be a role that only reads."""
    missing = grants.missing_rights(run, grants.Role.WORK)
    if not missing:
        return of_text(subject, Severity.OK, "complete")
    held = grants.membership(run)
    if held is grants.Role.WATCH and not is_for_workers:
        to_watch = grants.missing_rights(run, held)
        if not to_watch:
            return of_text(subject, Severity.OK, "complete to watch; a worker needs another login")
        return _lacking(run, subject, to_watch, grants.remedy(to_watch))
    if held in (grants.Role.WATCH, grants.Role.PUBLISH):
        text = f"the login is a member of {grants.role_name(run.schema, held)}, which cannot work"
        return of_text(subject, Severity.CRITICAL, text, "Connect with the login of a worker.")
    if held is not None:
        # An owner of all tables may have revoked rights from itself.
        return _lacking(run, subject, missing, grants.remedy(grants.missing_rights(run, held) or missing))
    role, schema = run.one(_ROLE, {"schema": run.schema})
    if grants.is_used(run, grants.Role.WORK):
        work = grants.text_of("{}", grants.role_name(run.schema, grants.Role.WORK))
        remedy = f"If this is the login of a worker, execute as an administrator: GRANT {work} TO {role};"
        return _lacking(run, subject, missing, remedy)
    # ALTER DEFAULT PRIVILEGES also gives the rights on tables that later versions create.
    remedy = "; ".join(
        f"{how} GRANT {rights} {kind} TO {role}".lstrip()
        for rights, every, later in (
            ("SELECT, INSERT, UPDATE, DELETE", "TABLES", "TABLES"),
            ("EXECUTE", "FUNCTIONS", "FUNCTIONS"),
            ("SELECT", "SEQUENCES", "SEQUENCES"),
        )
        for how, kind in (
            ("", f"ON ALL {every} IN SCHEMA {schema}"),
            (f"ALTER DEFAULT PRIVILEGES IN SCHEMA {schema}", f"ON {later}"),
        )
    )
    remedy = f"Execute as the owner of the tables: GRANT USAGE ON SCHEMA {schema} TO {role}; {remedy};"
    return _lacking(run, subject, missing, remedy)


def _lacking(run: Executor, subject: str, missing: Sequence[grants.MissingRight], remedy: str) -> Condition:
    lacking: dict[str, list[str]] = {}
    for one in missing:
        name = one.subject.partition(" ")[2].partition("(")[0].removeprefix(f"{run.schema}.")
        lacking.setdefault(name, []).append(one.right)
    role, _ = run.one(_ROLE, {"schema": run.schema})
    text = "; ".join(f"{', '.join(sorted(rights))} on {name}" for name, rights in lacking.items())
    # Without the sequences, only a figure of the summary is unknown.
    is_minor = all(one.subject.startswith("sequence ") for one in missing)
    return of_text(subject, Severity.WARNING if is_minor else Severity.CRITICAL, f"missing for {role}: {text}", remedy)


def direct_grants(database: BrokerDatabase) -> Iterator[Condition]:
    """Check the grants of the direct connection's role, which may be another role: ticks and retention need them."""
    if not database.listen_conninfo:
        return
    subject = "grants of LISTEN_URL"
    try:
        with contextlib.closing(database.open(name="outbox-doctor", direct=True)) as connection:
            name = connection.info.dbname
            yield _grants(Executor(connection, database.schema), subject, is_for_workers=True)
    except InvalidSchemaName:
        text = f"LISTEN_URL leads to the database {name!r}, which has no schema {database.schema!r}"
        remedy = "Correct OUTBOX['LISTEN_URL']: it must name the broker's database."
        yield of_text(subject, Severity.CRITICAL, text, remedy)
    except (BrokerUnavailable, psycopg.Error) as error:
        remedy = (
            "Correct OUTBOX['LISTEN_URL'], or allow the role in this URL to connect: without this connection, no "
            "process makes ticks."
        )
        yield of_text(subject, Severity.CRITICAL, str(error).strip(), remedy)


def _sees_sessions(run: Executor) -> Condition:
    [sees] = run.one(_SEES_SESSIONS)
    remedy = (
        "GRANT pg_read_all_stats to the broker's role: without it, the status cannot name sessions of other roles that "
        "hold locks."
    )
    return of_check(
        "sessions", sees, "visible" if sees else "sessions of other roles are hidden", remedy, Severity.WARNING
    )


def _declared(run: Executor) -> Iterator[Condition]:
    lonely = [name for (name,) in run.rows(_TOPICS)]
    remedy = (
        "No group reads these topics. If no worker has run yet, start one. Otherwise a subscriber is missing or "
        "misspells the topic, or the topic can be deleted."
    )
    yield of_check("topics without a group", not lonely, ", ".join(lonely) or "none", remedy, Severity.WARNING)
    if lacking := key_index.missing(run):
        remedy = "Run `manage.py outbox_install` as the owner of the tables. Until then, a search by key reads the log."
        yield of_text("searchable topics without an index", Severity.WARNING, ", ".join(lacking), remedy)
