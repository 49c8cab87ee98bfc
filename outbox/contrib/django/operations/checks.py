"""Checks that `manage.py check` runs to find problems before they occur."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connections

from outbox.contrib.django.engine.broker import engine_of
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.operations.database_checks import check_databases
from outbox.contrib.django.settings.conf import OutboxSettings, PathChoice, get_settings, imported
from outbox.contrib.django.subscribers.inbox import pool_shortages
from outbox.contrib.django.subscribers.registry import autodiscover
from outbox.errors import ConfigurationError, OutboxError
from outbox.subscription import Mode

_ROUTER: Final = "outbox.contrib.django.routers.BrokerRouter"


def register_all() -> None:
    """Register the checks with Django."""
    register(check_settings, "outbox")
    register(check_databases, Tags.database)


def check_settings(**options: Any) -> list[CheckMessage]:
    """Check the settings, the aliases they name, and the subscribers."""
    try:
        settings = get_settings()
    except ConfigurationError as error:
        return [Error(str(error), id="outbox.E001")]
    rules: Sequence[Callable[[OutboxSettings], Iterable[CheckMessage]]] = [
        _producer_group,
        _topic_imports,
        _celery_app,
        _transactions,
        _router,
        _subscribers,
        lambda settings: engine_of(settings).check(),
    ]
    return [found for rule in rules for found in rule(settings)]


def _producer_group(settings: OutboxSettings) -> Iterator[CheckMessage]:
    may_be_two_phase = settings.path is PathChoice.TWO_PHASE or ledger_aliases() != [settings.broker]
    if not settings.producer_group and may_be_two_phase and settings.path is not PathChoice.ATOMIC:
        yield Error(
            "OUTBOX['PRODUCER_GROUP'] is not set, but messages may take the two-phase path.",
            hint="Name this service, unlike any other that shares the broker, for example 'orders'.",
            id="outbox.E004",
        )


def _celery_app(settings: OutboxSettings) -> Iterator[CheckMessage]:
    if settings.celery_app is not None:
        try:
            imported("OUTBOX['CELERY_APP']", settings.celery_app)
        except ConfigurationError as error:
            yield Error(str(error), id="outbox.E016")


def _topic_imports(settings: OutboxSettings) -> Iterator[CheckMessage]:
    try:
        engine = engine_of(settings)
        _ = engine.codecs, engine.catalog
    except ConfigurationError as error:
        yield Error(str(error), id="outbox.E005")


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
            hint=f"Add {_ROUTER!r} to DATABASE_ROUTERS, unless {settings.broker!r} is an application database too.",
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
                f"{item.name} handles the FIFO topic {item.subscription.topic!r} concurrently: the order per key is "
                "lost.",
                hint="Pass mode='key_ordered' or mode='orderly' to @subscriber.",
                id="outbox.W015",
            )
        if settings.topics and not settings.auto_create_topics and item.subscription.topic not in settings.topics:
            yield Warning(
                f"{item.name} subscribes to {item.subscription.topic!r}, which OUTBOX['TOPICS'] does not declare.",
                hint="Declare it, unless another service does.",
                id="outbox.W013",
            )
    for shortage in pool_shortages(found):
        yield Warning(shortage, id="outbox.W016")
    for group, broadcast in kinds.items():
        if len(broadcast) > 1:
            yield Error(
                f"the subscribers of group {group!r} contradict each other: some are broadcast, some are not.",
                hint="Give the broadcast ones a group of their own.",
                id="outbox.E014",
            )
