"""Checks that `manage.py check` and `migrate` run to find mistakes in settings, subscribers and databases.

Decision 003 describes the check for groups that are new to a topic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import psycopg
from django.apps import apps
from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Info, Warning
from django.db import connections, router
from django.db.utils import DatabaseError

from outbox import hooks
from outbox.broker.database.executor import Executor, Row
from outbox.broker.log.topics import list_topics
from outbox.broker.operations.conditions import Condition, Severity
from outbox.broker.operations.progress import newcomers
from outbox.broker.operations.rules import unusable
from outbox.broker.schema.install import check_schema
from outbox.broker.schema.refusals import naming
from outbox.contrib.django.database.aliases import broker_database, on_broker
from outbox.contrib.django.engine.broker import engine_of
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.operations import mariadb
from outbox.contrib.django.operations.installation import left_behind, unknown_to_broker
from outbox.contrib.django.operations.sessions import demands
from outbox.contrib.django.operations.watching import refuse_unknown_thresholds
from outbox.contrib.django.settings.conf import OutboxSettings, get_settings, imported
from outbox.contrib.django.subscribers.inbox import handler_alias, pool_shortages
from outbox.contrib.django.subscribers.middleware import with_middleware
from outbox.contrib.django.subscribers.registry import Subscriber, autodiscover
from outbox.errors import BrokerError, ConfigurationError, OutboxError, SchemaError
from outbox.subscription import Effects, Mode, Subscription
from outbox.topic import Topic

logger = logging.getLogger(__name__)

_DEFAULT_TIMEOUT_SECONDS: Final = Subscription(topic="any", group="any").timeout_seconds
_ROUTER: Final = "outbox.contrib.django.routers.BrokerRouter"
_WITH_INBOX: Final = ("postgresql", "sqlite", "mysql")


def check_settings(**options: Any) -> list[CheckMessage]:
    """Check the settings, the aliases that the settings name, and the subscribers."""
    try:
        settings = get_settings()
        refuse_unknown_thresholds(settings.thresholds)
    except ConfigurationError as error:
        return [Error(str(error), id="outbox.E001")]
    rules: Sequence[Callable[[OutboxSettings], Iterable[CheckMessage]]] = [
        _producer_group,
        _imports,
        _transactions,
        _router,
        _subscribers,
        _handler_middleware,
        lambda settings: engine_of(settings).check(),
    ]
    return [found for rule in rules for found in rule(settings)]


def _producer_group(settings: OutboxSettings) -> Iterator[CheckMessage]:
    may_be_two_phase = ledger_aliases() != [settings.broker]
    if not settings.producer_group and may_be_two_phase:
        yield Error(
            "OUTBOX['PRODUCER_GROUP'] is not set, but messages may take the two-phase path.",
            hint="Set a name that no other service on the same broker uses, for example 'orders'.",
            id="outbox.E004",
        )


def _imports(settings: OutboxSettings) -> Iterator[CheckMessage]:
    """Import what the settings name by dotted paths."""
    of_celery = settings.celery_app
    named: Mapping[str, Callable[[], object]] = {
        "outbox.E005": lambda: engine_of(settings).codecs,
        "outbox.E016": lambda: of_celery is not None and imported("OUTBOX['CELERY_APP']", of_celery),
    }
    for check_id, read in named.items():
        try:
            read()
        except ConfigurationError as error:
            yield Error(str(error), id=check_id)


def _transactions(settings: OutboxSettings) -> Iterator[CheckMessage]:
    for alias in ledger_aliases():
        entry = connections[alias].settings_dict
        if not entry["AUTOCOMMIT"]:
            yield Error(
                f"DATABASES[{alias!r}] has AUTOCOMMIT off: publish() cannot see when a transaction commits.",
                hint="Leave AUTOCOMMIT on and use transaction.atomic().",
                id="outbox.E006",
            )
        level = str(entry["OPTIONS"].get("isolation_level", "")).replace("_", " ").lower()
        if "read uncommitted" in level and connections[alias].vendor != "postgresql":
            yield Error(
                f"DATABASES[{alias!r}] reads uncommitted rows: a check-back could mistake a running transaction for "
                "a committed one.",
                hint="Use 'read committed' or stricter.",
                id="outbox.E007",
            )


def _router(settings: OutboxSettings) -> Iterator[CheckMessage]:
    dedicated = settings.broker in connections and settings.broker != "default" and settings.has_database
    if dedicated and not any(str(router).endswith("BrokerRouter") for router in django_settings.DATABASE_ROUTERS):
        yield Warning(
            f"`migrate --database={settings.broker}` would create the tables of all apps in the broker's database.",
            hint=f"If {settings.broker!r} is not also an application database, add {_ROUTER!r} to DATABASE_ROUTERS.",
            id="outbox.W008",
        )


def _subscribers(settings: OutboxSettings) -> Iterator[CheckMessage]:
    try:
        found = autodiscover()
    except OutboxError as error:
        yield Error(str(error), id="outbox.E009")
        return
    kinds: dict[str, set[bool]] = {}
    for item in found:
        kinds.setdefault(item.subscription.group, set()).add(item.subscription.broadcast)
        if item.using is not None and item.using not in connections:
            yield Error(f"{item.name} uses the alias {item.using!r}, which is not in DATABASES.", id="outbox.E010")
        declared = settings.topics.get(item.subscription.topic)
        if declared is not None and declared.topic.is_fifo and item.subscription.mode is Mode.CONCURRENT:
            yield Warning(
                f"{item.name} handles the FIFO topic {item.subscription.topic!r} concurrently, so the messages of a "
                "key are handled without an order.",
                hint="Pass mode='key_ordered' or mode='orderly' to @subscriber.",
                id="outbox.W015",
            )
        if settings.topics and item.subscription.topic not in settings.topics:
            yield Warning(
                f"{item.name} subscribes to {item.subscription.topic!r}, which OUTBOX['TOPICS'] does not declare.",
                hint="Declare the topic, or ignore this warning if another service declares it.",
                id="outbox.W013",
            )
        yield from _slow_calls(item, settings)
        yield from _options(item)
    for shortage in pool_shortages(found):
        yield Warning(shortage, id="outbox.W016")
    for group, broadcast in kinds.items():
        if len(broadcast) > 1:
            yield Error(
                f"some subscribers of group {group!r} have broadcast=True and some do not. All subscribers of a "
                "group must have the same `broadcast`.",
                hint="Give the subscribers with broadcast=True another group.",
                id="outbox.E014",
            )


def _handler_middleware(settings: OutboxSettings) -> Iterator[CheckMessage]:
    try:
        with_middleware(lambda given: None)
    except ConfigurationError as error:
        yield Error(str(error), id="outbox.E037")


def _options(item: Subscriber) -> Iterator[CheckMessage]:
    """Name options of parts that the project does not turn on: their commands, pages and conditions are missing."""
    for option in item.subscription.options:
        module = type(option).__module__
        if apps.get_containing_app_config(module) is None:
            yield Error(
                f"{item.name} has the option {option!r} of a part that is not in INSTALLED_APPS.",
                hint=f"Add {module.rpartition('.')[0]!r} to INSTALLED_APPS, or remove the option.",
                id="outbox.E042",
            )


def _slow_calls(item: Subscriber, settings: OutboxSettings) -> Iterator[CheckMessage]:
    """Compare the effects and the time limit of a subscriber with its database, the lease and the end of a process."""
    seconds = item.subscription.timeout_seconds
    alias = handler_alias(item)
    if item.idempotent and alias in connections and connections[alias].vendor not in _WITH_INBOX:
        yield Error(
            f"{item.name}: the inbox needs PostgreSQL, SQLite or MariaDB, but {alias!r} is a database of the kind "
            f"{connections[alias].vendor!r}.",
            hint="Give the subscriber another alias with using=….",
            id="outbox.E034",
        )
    if item.subscription.effects is Effects.INSIDE and item.idempotent and seconds > _DEFAULT_TIMEOUT_SECONDS:
        yield Info(
            f"{item.name} has timeout_seconds={seconds:g}, but the server ends its transaction if the transaction "
            f"executes no statement for {0.8 * settings.lease_seconds:g} s (four fifths of OUTBOX['LEASE_SECONDS']).",
            hint="If the handler waits for another system, pass effects='outside' to @subscriber.",
            id="outbox.I035",
        )


# ---------------------------------------------------------------------------------------------------------------------
# Checks that read databases, of `manage.py check --database ALIAS` and `migrate`.

_MIGRATIONS: Final = "django_migrations"


def check_databases(*, databases: Iterable[str] | None = None, **options: Any) -> list[CheckMessage]:
    """Open a connection to each given alias, and check its tables and its server's settings."""
    try:
        settings = get_settings()
    except ConfigurationError:
        # `check_settings` reports it.
        return []
    if settings.in_memory:
        return []
    wanted = set(databases or ())
    found: list[CheckMessage] = []
    for alias in ledger_aliases():
        if alias in wanted:
            found.extend(_application_database(alias, settings))
    if settings.has_database and settings.broker in wanted:
        found.extend(_broker_database(settings))
    for alias in sorted(wanted & set(connections) - {settings.broker}):
        if connections[alias].vendor == "postgresql":
            found.extend(_former_broker(alias, settings))
    found.extend(_sessions(wanted, settings))
    return found


def _sessions(wanted: set[str], settings: OutboxSettings) -> Iterator[CheckMessage]:
    try:
        found = [one for one in demands(settings) if wanted.intersection(one.aliases)]
    except OutboxError as error:
        # `check_settings` reports what cannot be imported.
        logger.debug("the check cannot add up the sessions of the handlers: %s", error)
        return
    for one in found:
        if one.is_too_much:
            yield Warning(
                f"the server may refuse connections: {one}.",
                hint="Reduce OUTBOX['HANDLER_THREADS'], CONSUMER_PROCESSES or the number of workers, use a pooler, or "
                "raise the limit (docs/operations/connections.md).",
                id="outbox.W042",
            )


def _application_database(alias: str, settings: OutboxSettings) -> Iterator[CheckMessage]:
    connection = connections[alias]
    try:
        with connection.cursor() as cursor:
            tables = set(connection.introspection.table_names(cursor))
            missing = [name for name in ("outbox_ledger", "outbox_inbox", *_of_parts(alias)) if name not in tables]
            durable = _durable(connection.vendor, cursor)
            unfit = list(mariadb.problems(connection)) if connection.vendor == "mysql" else []
    except DatabaseError as error:
        yield Error(
            f"the database {alias!r} cannot be read: {error}.",
            hint="Check that its server runs, and the address, login and rights of this alias in DATABASES.",
            id="outbox.E020",
        )
        return
    if missing and _MIGRATIONS in tables:
        # Only a warning, because `migrate` runs this check before it creates the tables. Before the first `migrate`,
        # nothing is reported.
        yield Warning(
            f"{' and '.join(missing)} are missing in {alias!r}. Calls of publish() and subscribers on this alias "
            "need these tables.",
            hint=f"Check that {alias!r} leads to the right database, then run `manage.py migrate --database={alias}`.",
            id="outbox.W021",
        )
    yield from unfit
    if not durable:
        yield _not_durable(alias)
    if not missing and settings.has_database:
        yield from _foreign_ledger(alias, settings)


def _of_parts(alias: str) -> Iterator[str]:
    for app in apps.get_app_configs():
        if app.label in hooks.tables:
            models = (model for model in app.get_models() if model._meta.managed)
            yield from (model._meta.db_table for model in models if router.allow_migrate_model(alias, model))


def _durable(vendor: str, cursor: Any) -> bool:
    if vendor != "postgresql":
        return True
    cursor.execute("SELECT current_setting('synchronous_commit') <> 'off' AND current_setting('fsync') = 'on'")
    return bool(cursor.fetchone()[0])


def _not_durable(alias: str) -> Warning:
    return Warning(
        f"the server of {alias!r} may lose acknowledged commits, because synchronous_commit or fsync is off. So "
        "messages can be lost, or the broker can deliver messages of transactions that the server has lost.",
        hint="Turn on both parameters.",
        id="outbox.W022",
    )


def _broker_database(settings: OutboxSettings) -> Iterator[CheckMessage]:
    try:
        with (
            broker_database(settings).connect(name="outbox-check") as connection,
            naming(f"reading the broker on {settings.broker!r}", settings.schema),
        ):
            check_schema(connection, settings.schema)
            run = Executor(connection, settings.schema)
            yield from _undeclared(settings, {topic.name: topic for topic in list_topics(run)})
            yield from _new_groups(run)
            with connection.cursor() as cursor:
                if not _durable("postgresql", cursor):
                    yield _not_durable(settings.broker)
    except SchemaError as error:
        # A warning, for the same reasons as above.
        if _MIGRATIONS in connections[settings.broker].introspection.table_names():
            yield from _unusable(error, Warning, "outbox.W026")
    except ConfigurationError as error:
        yield Error(str(error), id="outbox.E025")
    except BrokerError as error:
        yield from _unusable(error, Error, "outbox.E025")


def _unusable(error: Exception, level: type[Error] | type[Warning], check_id: str) -> Iterator[CheckMessage]:
    """Return the check messages for an error of the broker, with the same texts as `outbox_status`."""
    for one in unusable(error).conditions:
        yield level(one.text, hint=one.next_step, id=check_id)


def _foreign_ledger(alias: str, settings: OutboxSettings) -> Iterator[CheckMessage]:
    try:
        unknown = unknown_to_broker(alias, settings)
    except (OutboxError, psycopg.Error, DatabaseError) as error:
        # Other checks report a database that cannot be read.
        logger.debug("the ledger on %r cannot be compared with the broker: %s", alias, error)
        return
    if unknown:
        yield Warning(
            f"{unknown} of the oldest rows of the ledger on {alias!r} belong to transactions that the broker on "
            f"{settings.broker!r} has never stored. OUTBOX['BROKER'] was changed, or the broker's database was "
            "replaced, before all messages were delivered. No worker delivers the messages of these transactions, "
            "or answers their checks.",
            hint="Set OUTBOX['BROKER'] to the previous broker, and run `manage.py outbox_worker --until-drained`, "
            "which delivers the remaining messages. Pruning removes the ledger rows of a drained broker after "
            "OUTBOX['INBOX_RETENTION_SECONDS'].",
            id="outbox.W029",
        )


def _former_broker(alias: str, settings: OutboxSettings) -> Iterator[CheckMessage]:
    try:
        left = left_behind(alias, settings)
    except (OutboxError, psycopg.Error) as error:
        # A project can read every broker that it has used, so this is not its former one.
        logger.debug("the check could not find out whether %r has a broker: %s", alias, error)
        return
    if left:
        yield Warning(
            f"OUTBOX['BROKER'] is {settings.broker!r}, but a broker on {alias!r} has messages of this project: "
            f"{'; '.join(left)}. No worker of this project delivers these messages or answers their checks.",
            hint=f"Let `manage.py outbox_worker --until-drained` deliver them with BROKER set back to {alias!r}.",
            id="outbox.W028",
        )


def _new_groups(run: Executor) -> Iterator[CheckMessage]:
    try:
        found = new_groups(run)
    except OutboxError as error:
        # `check_settings` reports what cannot be imported.
        logger.debug("the check cannot find out which groups are new to a topic: %s", error)
        return
    for one in found:
        yield Warning(one.meaning, hint=one.next_step, id="outbox.W032")


def _undeclared(settings: OutboxSettings, known: Mapping[str, Topic]) -> Iterator[CheckMessage]:
    differing = [name for name, declared in settings.topics.items() if known.get(name) != declared.topic]
    if differing:
        yield Warning(
            "these topics are missing on the broker, or differ from OUTBOX['TOPICS']: "
            f"{', '.join(map(repr, differing))}.",
            hint=f"Run `manage.py migrate --database={settings.broker}`.",
            id="outbox.W027",
        )


# ---------------------------------------------------------------------------------------------------------------------
# Consumer groups that are new to a topic whose messages other groups have handled. Such a group may be an old one under
# a new name, and would handle these messages again.


def new_groups(run: Executor) -> list[Condition]:
    """Return the project's groups without `start` that would begin with messages that other groups have handled."""
    known = autodiscover()
    wanted = [
        (item.subscription.group, item.subscription.topic)
        for item in known
        if not (item.names_start or item.subscription.broadcast)
    ]
    groups = [hooks.resolved(role.groups)() for role in hooks.roles.values() if role.groups is not None]
    of_roles: dict[str, Mapping[str, bool]] = {name: topics for found in groups for name, topics in found.items()}
    wanted += [(name, topic) for name, topics in of_roles.items() for topic, is_given in topics.items() if not is_given]
    of_project = {*(item.subscription.group for item in known), *of_roles}
    return [_said(one, of_project) for one in newcomers(run, wanted)]


def warn_of_new_groups(groups: Collection[str]) -> None:
    """Log a warning for each of `groups` that is new to a topic. If the broker cannot be reached, log no warning."""
    try:
        found = on_broker(new_groups)
    except OutboxError as error:
        logger.debug("the check cannot find out which groups are new to a topic: %s", error)
        return
    for one in found:
        if one.evidence[0]["group"] in groups:
            logger.warning("%s %s", one.meaning, one.next_step)


def _said(one: Row, of_project: Collection[str]) -> Condition:
    text = (
        f"the group {one.group!r} is new to the topic {one.topic!r}. The group will handle all messages of the topic, "
        f"about {one.messages}, which {', '.join(map(repr, one.handled_by))} handled before."
    )
    former = [name for name in one.without_consumers if name not in of_project]
    renamed = (
        f" If the new group is {former[0]!r} under another name, give it the former name, or pause publishing while "
        "the group changes (docs/changing-messages.md#another-name-for-a-group)."
        if former
        else ""
    )
    return Condition(
        "new_group",
        Severity.WARNING,
        [{"group": one.group, "topic": one.topic, "messages": one.messages}],
        1,
        text,
        "Declare where the group begins: start='earliest' to handle all these messages, start='latest' to handle "
        f"none.{renamed}",
    )
