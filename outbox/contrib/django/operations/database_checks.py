"""Checks that read databases: run by `manage.py check --database ALIAS` and by `migrate`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import psycopg
from django.core.checks import CheckMessage, Error, Warning
from django.db import connections
from django.db.utils import DatabaseError

from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import list_topics
from outbox.broker.operations.rules import unusable
from outbox.broker.schema.install import check_schema
from outbox.broker.schema.refusals import naming
from outbox.broker.transaction import turns
from outbox.contrib.django.database.aliases import broker_database
from outbox.contrib.django.database.in_tests import refuse_in_tests
from outbox.contrib.django.engine.path import prove
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.operations.left_behind import left_behind, unknown_to_broker
from outbox.contrib.django.operations.new_groups import new_groups
from outbox.contrib.django.settings.conf import OutboxSettings, PathChoice, get_settings
from outbox.errors import BrokerError, ConfigurationError, OutboxError, SchemaError
from outbox.topic import Topic

logger = logging.getLogger(__name__)

_MIGRATIONS: Final = "django_migrations"


def check_databases(*, databases: Iterable[str] | None = None, **options: Any) -> list[CheckMessage]:
    """Check the tables and the live connections of the given aliases."""
    try:
        settings = get_settings()
    except ConfigurationError:
        # check_settings reports the problem.
        return []
    if settings.in_memory:
        return []
    wanted = set(databases or ())
    found: list[CheckMessage] = []
    for alias in ledger_aliases():
        if alias in wanted:
            found.extend(_application_database(alias, settings))
    if settings.broker in wanted:
        found.extend(_broker_database(settings))
    for alias in sorted(wanted & set(connections) - {settings.broker}):
        if connections[alias].vendor == "postgresql":
            found.extend(_former_broker(alias, settings))
    return found


def _application_database(alias: str, settings: OutboxSettings) -> Iterator[CheckMessage]:
    connection = connections[alias]
    try:
        with connection.cursor() as cursor:
            tables = set(connection.introspection.table_names(cursor))
            missing = [name for name in ("outbox_ledger", "outbox_inbox") if name not in tables]
            durable = _durable(connection.vendor, cursor)
    except DatabaseError as error:
        yield Error(f"the database {alias!r} cannot be read: {error}.", id="outbox.E020")
        return
    if missing and _MIGRATIONS in tables:
        # A warning: `migrate` runs these checks before it creates the tables, and stops at errors. Before its first run
        # the tables are expected to be missing, so no message is given.
        yield Warning(
            f"{' and '.join(missing)} are missing in {alias!r}, where publish() or a subscriber may need them.",
            hint=f"Run `manage.py migrate --database={alias}`.",
            id="outbox.W021",
        )
    if not durable:
        yield _not_durable(alias)
    if settings.path is PathChoice.ATOMIC and connection.vendor == "postgresql" and settings.has_database:
        yield from _forced_path(alias)
    if not missing and settings.has_database:
        yield from _foreign_ledger(alias, settings)


def _durable(vendor: str, cursor: Any) -> bool:
    if vendor != "postgresql":
        return True
    cursor.execute("SELECT current_setting('synchronous_commit') <> 'off' AND current_setting('fsync') = 'on'")
    return bool(cursor.fetchone()[0])


def _not_durable(alias: str) -> Warning:
    return Warning(
        f"the server behind {alias!r} may lose acknowledged commits (synchronous_commit or fsync is off): then "
        "messages can be lost, or appear for transactions that are gone.",
        hint="Turn them on: without them messages can be lost.",
        id="outbox.W022",
    )


def _forced_path(alias: str) -> Iterator[CheckMessage]:
    connection = connections[alias]
    connection.ensure_connection()
    try:
        refuse_in_tests(get_settings().broker)
    except ConfigurationError:
        # Test databases are being made without the broker's, so no test can publish there.
        return
    try:
        same = prove(connection, get_settings()) is not None
    except OutboxError as error:
        yield Error(str(error), id="outbox.E023")
        return
    if not same:
        yield Error(
            f"OUTBOX['PATH'] is 'atomic', but {alias!r} is connected to another database than the broker.",
            hint="Set PATH to 'auto'.",
            id="outbox.E024",
        )


def _broker_database(settings: OutboxSettings) -> Iterator[CheckMessage]:
    try:
        with (
            broker_database(settings).connect(name="outbox-check") as connection,
            naming(f"reading the broker on {settings.broker!r}", settings.schema),
        ):
            check_schema(connection, settings.schema)
            yield from _undeclared(
                settings, {topic.name: topic for topic in list_topics(Executor(connection, settings.schema))}
            )
            yield from _check_back_is_absent(Executor(connection, settings.schema), settings)
            yield from _new_groups(Executor(connection, settings.schema))
            with connection.cursor() as cursor:
                if not _durable("postgresql", cursor):
                    yield _not_durable(settings.broker)
    except SchemaError as error:
        # As above: `migrate` repairs it.
        if _MIGRATIONS in connections[settings.broker].introspection.table_names():
            yield from _unusable(error, Warning, "outbox.W026")
    except ConfigurationError as error:
        yield Error(str(error), id="outbox.E025")
    except BrokerError as error:
        yield from _unusable(error, Error, "outbox.E025")


def _unusable(error: Exception, level: type[Error] | type[Warning], check_id: str) -> Iterator[CheckMessage]:
    """The condition that the status shows for this error, as a check."""
    for one in unusable(error).conditions:
        yield level(one.text, hint=one.next_step, id=check_id)


def _foreign_ledger(alias: str, settings: OutboxSettings) -> Iterator[CheckMessage]:
    try:
        unknown = unknown_to_broker(alias, settings)
    except (OutboxError, psycopg.Error, DatabaseError) as error:
        # The checks of that database report the problem.
        logger.debug("the ledger on %r cannot be compared with the broker: %s", alias, error)
        return
    if unknown:
        yield Warning(
            f"the ledger on {alias!r} has rows ({unknown} of its oldest) of transactions that the broker on "
            f"{settings.broker!r} has never seen: was OUTBOX['BROKER'] changed, or its database replaced, with "
            "messages in flight? No worker delivers those messages or answers for them.",
            hint="Set BROKER back and let `manage.py outbox_worker --until-drained` deliver the remaining messages. "
            "The rows of a drained broker are pruned after INBOX_RETENTION_SECONDS.",
            id="outbox.W029",
        )


def _former_broker(alias: str, settings: OutboxSettings) -> Iterator[CheckMessage]:
    try:
        left = left_behind(alias, settings)
    except (OutboxError, psycopg.Error) as error:
        # A broker that the project cannot read is not its own.
        logger.debug("whether %r holds a broker cannot be determined: %s", alias, error)
        return
    if left:
        yield Warning(
            f"OUTBOX['BROKER'] is {settings.broker!r}, but a broker on {alias!r} holds messages of this project: "
            f"{'; '.join(left)}. No worker of this project delivers them or answers for them.",
            hint=f"Let `manage.py outbox_worker --until-drained` deliver them with BROKER set back to {alias!r}.",
            id="outbox.W028",
        )


def _check_back_is_absent(run: Executor, settings: OutboxSettings) -> Iterator[CheckMessage]:
    for found in turns.unasked(run):
        if found.producer_group == settings.producer_group:
            yield Warning(
                str(found), hint="Start `celery worker --outbox` or `manage.py outbox_worker`.", id="outbox.W030"
            )


def _new_groups(run: Executor) -> Iterator[CheckMessage]:
    try:
        found = new_groups(run)
    except OutboxError as error:
        # check_settings reports why the subscribers cannot be imported.
        logger.debug("new groups cannot be determined: %s", error)
        return
    for one in found:
        yield Warning(one.meaning, hint=one.next_step, id="outbox.W032")


def _undeclared(settings: OutboxSettings, known: Mapping[str, Topic]) -> Iterator[CheckMessage]:
    differing = [name for name, declared in settings.topics.items() if known.get(name) != declared.topic]
    if differing:
        yield Warning(
            f"the broker does not have {', '.join(map(repr, differing))} as OUTBOX['TOPICS'] declares.",
            hint=f"Run `manage.py migrate --database={settings.broker}`.",
            id="outbox.W027",
        )
