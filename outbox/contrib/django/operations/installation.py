"""Installs and removes the broker's schema, its topics, and the ledger's identity (`migrate`, `outbox_install`).

`left_behind` finds undelivered messages of the project on a broker that the project used before.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import psycopg
from django.apps.registry import Apps
from django.apps.registry import apps as global_apps
from django.core.management import CommandError
from django.db import connections, router

from outbox.broker.database import timeouts
from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import declare_topics, list_topics
from outbox.broker.operations.audit import count_messages
from outbox.broker.operations.liveness import leadership
from outbox.broker.operations.presence import is_used_by, unknown_transactions
from outbox.broker.operations.summary import live_consumers
from outbox.broker.schema import key_index
from outbox.broker.schema.install import (
    DEFAULT_PATIENCE_SECONDS,
    SCHEMA_VERSION,
    check_schema,
    install,
    installed_version,
    missing_parts,
)
from outbox.broker.schema.uninstall import drop_part, rows_of_part, uninstall
from outbox.contrib.django.database.aliases import broker_database, database_at
from outbox.contrib.django.engine.broker import reset_broker
from outbox.contrib.django.engine.postgres import undelivered
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.pruning import first_id_at
from outbox.contrib.django.operations.granting import renew
from outbox.contrib.django.settings.conf import OutboxSettings, get_settings
from outbox.contrib.django.subscribers.registry import subscribers
from outbox.errors import OutboxError, SchemaError, UsageError
from outbox.topic import Topic

logger = logging.getLogger(__name__)


def after_migrate(
    *, using: str, apps: Apps = global_apps, plan: Sequence[tuple[Any, bool]] = (), **options: Any
) -> None:
    """Receive the signal post_migrate. After a flush, Django sends the signal without the arguments `apps` and `plan`.

    Raises CommandError if the broker's tables cannot be installed.
    """
    if any(migration.app_label == "outbox" and backwards for migration, backwards in plan):
        # The application's tables are being removed, so do not create the broker's tables.
        return
    name_ledger(using, apps)
    renew(using)
    settings = get_settings()
    if using == settings.broker and settings.has_database:
        out = options.get("stdout")
        try:
            install_broker(settings, report=out.write if out and options.get("verbosity") else logger.warning)
        except OutboxError as error:
            raise CommandError(str(error)) from error


def name_ledger(alias: str, apps: Apps) -> None:
    """Give the ledger an id if it has none, as after a flush."""
    try:
        identity = apps.get_model("outbox", "LedgerIdentity")
    except LookupError:
        # All migrations were reversed, so the model does not exist.
        return
    if router.allow_migrate_model(alias, identity):
        identity._base_manager.using(alias).get_or_create(singleton=True)


def install_broker(
    settings: OutboxSettings,
    *,
    patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
    report: Callable[[str], None] = logger.warning,
) -> tuple[int, int]:
    """Install or upgrade the broker's tables, declare the topics of the settings, and build the indexes of keys.

    A second call changes nothing. `report` gets a line for each topic that was declared differently before, and is
    passed to `install`, as `patience_seconds` is.

    Returns the versions of the schema before and after the call. Raises SchemaError, BrokerUnavailable or
    ConfigurationError.
    """
    with _administering(settings) as connection:
        before = installed_version(connection, settings.schema)
        version = install(connection, settings.schema, patience_seconds=patience_seconds, report=report)
        run = Executor(connection, settings.schema)
        known = {one.name: one for one in list_topics(run)}
        declare_topics(run, [declared.topic for declared in settings.topics.values()])
        for name, declared in sorted(settings.topics.items()):
            if name in known and (changes := _changes(known[name], declared.topic)):
                report(f"topic {name!r} is changed: {changes}.")
        key_index.adapt(run, report=report)
    logger.info("broker on %r: schema %r at version %d", settings.broker, settings.schema, version)
    # The topics that this process has cached may be out of date.
    reset_broker()
    return before, version


def _changes(before: Topic, after: Topic) -> str:
    """Return what differs between two declarations of a topic, as `queue_count from 4 to 8`."""

    def shown(value: object) -> str:
        return ", ".join(sorted(map(str, value))) if isinstance(value, frozenset) else str(value)

    pairs = [(one.name, getattr(before, one.name), getattr(after, one.name)) for one in dataclasses.fields(before)]
    return "; ".join(f"{name} from {shown(old)} to {shown(new)}" for name, old, new in pairs if old != new)


def planned_installation(settings: OutboxSettings) -> tuple[int, int]:
    """Return what `install_broker` would return, but change nothing. Raises the same errors as `install_broker`."""
    with _administering(settings) as connection:
        before = installed_version(connection, settings.schema)
        if before >= SCHEMA_VERSION and not missing_parts(connection, settings.schema):
            check_schema(connection, settings.schema)
        return before, max(before, SCHEMA_VERSION)


def remove_broker(settings: OutboxSettings, *, force: bool, dry_run: bool, patience_seconds: float) -> list[str]:
    """Drop the broker's tables with all messages. Return the reasons not to drop them.

    If there is one, and `force` is False, raises UsageError. Also raises SchemaError, BrokerUnavailable or
    ConfigurationError.
    """
    with _administering(settings) as connection:
        check_schema(connection, settings.schema)
        left = list(_left_in(Executor(connection, settings.schema)))
        if left and not force:
            raise UsageError(
                f"the broker on {settings.broker!r} is not empty: {'; '.join(left)}. Nothing was dropped. Stop the "
                "workers after everything is delivered, or pass --force to drop the tables with these messages."
            )
        if not dry_run:
            uninstall(connection, settings.schema, patience_seconds=patience_seconds, report=logger.warning)
    reset_broker()
    return left


def remove_part(
    settings: OutboxSettings, part: str, *, force: bool, dry_run: bool, patience_seconds: float
) -> dict[str, int]:
    """Drop the tables of a part that no service on this broker uses any more. Return the number of rows per table.

    Raises UsageError if they have rows and `force` is False, if this project has the part, or if no service has
    installed it; and the errors of `remove_broker`.
    """
    with _administering(settings) as connection:
        rows = rows_of_part(connection, part, settings.schema)
        if rows and not force:
            left = ", ".join(f"{count} in {table}" for table, count in rows.items())
            raise UsageError(
                f"the part {part!r} has rows on {settings.broker!r}: {left}. Nothing was dropped. If no service needs "
                "them, pass --force to drop the tables with these rows."
            )
        if not dry_run:
            drop_part(connection, part, settings.schema, patience_seconds=patience_seconds, report=logger.warning)
    return rows


def _left_in(run: Executor) -> Iterator[str]:
    """Yield the reasons against dropping the tables: processes that use them, and undelivered messages."""
    if leadership(run).leader:
        yield "a broker process runs"
    for group, consumers in live_consumers(run).items():
        yield f"group {group!r} has {consumers} consumers"
    yield from undelivered(count_messages(run))


@contextmanager
def _administering(settings: OutboxSettings) -> Iterator[Connection]:
    with broker_database(settings).connect_as_owner() as connection:
        try:
            timeouts.lift_where_direct(connection)
            yield connection
        except psycopg.Error as error:
            raise SchemaError(
                f"the broker's tables in schema {settings.schema!r} on {settings.broker!r} were not changed: "
                f"{str(error).strip()}. Run this command as a role that owns the tables and has CREATE on the database."
            ) from error


# ---------------------------------------------------------------------------------------------------------------------
# Undelivered messages in a broker that the project used before OUTBOX was changed. No worker uses that broker now.

_SAMPLE: Final = 100


def left_behind(alias: str, settings: OutboxSettings) -> list[str]:
    """Return the project's undelivered messages in a broker on `alias` that is not OUTBOX['BROKER'].

    Raises BrokerUnavailable, or psycopg.Error if the tables cannot be read.
    """
    groups = sorted({item.subscription.group for item in subscribers()})
    with database_at(alias, settings).connect(name="outbox-check") as connection:
        if installed_version(connection, settings.schema) == 0:
            return []
        run = Executor(connection, settings.schema)
        if not is_used_by(run, producer_group=settings.producer_group, consumer_groups=groups):
            return []
        return list(undelivered(count_messages(run)))


def unknown_to_broker(alias: str, settings: OutboxSettings) -> int:
    """Return how many of the oldest ledger rows on `alias` have transactions that the broker has never seen.

    Pruning removes a row only if the broker shows its transaction as decided. So rows whose transactions are on another
    broker stay, and become the oldest rows of the ledger. Raises BrokerError, psycopg.Error, or django.db.Error.
    """
    below = first_id_at(datetime.now(UTC) - timedelta(minutes=1))
    ids = ledger.ids_between(connections[alias], UUID(int=0), below, limit=_SAMPLE)
    if not ids:
        return 0
    with broker_database(settings).connect(name="outbox-check") as connection:
        check_schema(connection, settings.schema)
        return len(unknown_transactions(Executor(connection, settings.schema), ids))
