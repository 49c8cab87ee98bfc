"""The setting `OUTBOX`: read when needed, checked once, never frozen at import.

    OUTBOX = {
        "BROKER": "broker",                     # alias of the broker's database (default: DEFAULT_DB_ALIAS)
        "PRODUCER_GROUP": "orders",             # answers check-backs; unique per service, no default
        "TOPICS": {"order-paid": {"types": ["FIFO", "TRANSACTION"], "queue_count": 8}},
    }

Every key is a field of `OutboxSettings` in capitals.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypeVar

from django.conf import settings as django_settings
from django.db import DEFAULT_DB_ALIAS
from django.utils.module_loading import import_string

from outbox.broker.operations.thresholds import Thresholds
from outbox.contrib.django.settings import setting_rules
from outbox.contrib.django.settings.forward_rules import DeclaredForward, forwards
from outbox.contrib.django.settings.receive_rules import DeclaredReceive, receives
from outbox.errors import ConfigurationError, InvalidName
from outbox.topic import DEFAULT_QUEUE_COUNT, DEFAULT_RETENTION_SECONDS, MessageType, Topic
from outbox.transaction import CheckSettings

Value = TypeVar("Value")

_DAY: Final = 24 * 3600.0


class PathChoice(enum.StrEnum):
    """The way of a transactional publish to the broker."""

    AUTO = "auto"
    """Chosen per live connection: atomic if it leads to the broker's own database."""
    TWO_PHASE = "two_phase"
    """Always half message, local transaction, end message."""
    ATOMIC = "atomic"
    """Always through the application's own connection; an error if the broker is elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredTopic:
    """One entry of TOPICS. `codec` and `selector` are dotted paths, imported when first needed."""

    topic: Topic
    codec: str | None = None
    selector: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OutboxSettings:
    """The checked settings. Times are in seconds.

    `in_memory` replaces the broker by one in this process, for tests. `broker` is the alias of the broker's database,
    or the address of RocketMQ (`rocketmq://PROXY:8081?brokers=BROKER:10911`, docs/engines.md). `schema` is the schema
    of the broker's tables. `listen_url` is a direct connection string for LISTEN if the alias goes through a
    transaction pooler ('' does without LISTEN and polls). `producer_group` names this service for check-back: exactly
    the processes that can answer for its local transactions use it. `codec` is the dotted path of the codec of topics
    that name none (default: JSON). `subscriber_module` is the module of each app that workers import. `ledger=False`
    does without the ledger table: then every transactional message needs `check=`.

    `immunity_seconds`, `check_retry_seconds`, `max_checks` and `max_check_age_seconds` say when an undecided message is
    checked, and when it is parked. `check_interval_seconds` is the period of the pass that checks.
    `require_transaction` refuses to publish outside of a transaction, on every topic. `inbox_retention_seconds` must be
    longer than the retention of the log, all retries, and the dead letters that may still be replayed.

    A worker has `consumer_processes` consumer processes. If it has one, that one also sequences, and the broker's
    process is its standby, unless `broker_apart` is set. Set it if handlers compute for long or kill their process.
    `lease_seconds` is the term of a queue's lease. A handler's connection stops waiting for a lock after half of it,
    and ends an idle transaction after four fifths, so that a frozen process blocks no other. `drain_seconds` is the
    time a worker's processes have to finish when it stops, before they are killed. `celery_app` is the dotted path of
    the Celery app that gets the transactional tasks.

    `thresholds` gives the limits for warnings in the status; `audit_interval_seconds` is the interval of the
    conservation audit. `metrics` measures each process, for prometheus-client; a scraper that is not staff sends
    `metrics_token`. In `health_directory` a worker's processes write heartbeats and metrics. With `health_address`
    (HOST:PORT) one more process serves /live, /ready and /metrics. `tracing` traces messages, for OpenTelemetry.
    `forward` declares what `outbox_worker --role forward` sends elsewhere, by consumer group; `receive` declares what
    `outbox_worker --role receive` stores of foreign messages.

    `masked_fields` names, by topic ('*': all), the fields of bodies and headers that neither the operations page nor a
    command shows.
    """

    in_memory: bool = False
    broker: str = DEFAULT_DB_ALIAS
    schema: str = "outbox"
    listen_url: str | None = field(default=None, repr=False)
    producer_group: str = ""
    forward: Mapping[str, DeclaredForward] = field(default_factory=dict)
    receive: Mapping[str, DeclaredReceive] = field(default_factory=dict)
    path: PathChoice = PathChoice.AUTO
    topics: Mapping[str, DeclaredTopic] = field(default_factory=dict)
    codec: str | None = None
    subscriber_module: str = "subscribers"
    auto_create_topics: bool = False
    require_transaction: bool = False
    send_timeout_seconds: float = 3.0
    ledger: bool = True
    immunity_seconds: int = 6
    check_interval_seconds: float = 30.0
    check_retry_seconds: int = 60
    max_checks: int = 15
    max_check_age_seconds: int = int(3 * _DAY)
    inbox_retention_seconds: float = 14 * _DAY
    consumer_processes: int = 1
    broker_apart: bool = False
    lease_seconds: float = 10.0
    drain_seconds: float = 20.0
    celery_app: str | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    audit_interval_seconds: float = _DAY
    metrics: bool = False
    metrics_token: str | None = field(default=None, repr=False)
    tracing: bool = False
    health_directory: str | None = None
    health_address: str | None = None
    masked_fields: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def required_producer_group(self) -> str:
        """The producer group; ConfigurationError if there is none."""
        if not self.producer_group:
            raise ConfigurationError(
                "OUTBOX['PRODUCER_GROUP'] is not set: name this service (for example 'orders'), unlike any other "
                "service that shares the broker. Check-back asks it for the outcome of its transactions."
            )
        return self.producer_group

    @property
    def is_rocketmq(self) -> bool:
        """Whether the broker is RocketMQ."""
        return not self.in_memory and self.broker.startswith("rocketmq://")

    @property
    def has_database(self) -> bool:
        """Whether the broker is the bundled one, in the database of the alias `broker`."""
        return not self.in_memory and not self.is_rocketmq

    @property
    def check(self) -> CheckSettings:
        """When the broker checks half messages, and when it parks them."""
        return CheckSettings(
            immunity_seconds=self.immunity_seconds,
            recheck_seconds=self.check_retry_seconds,
            max_checks=self.max_checks,
            max_age_seconds=self.max_check_age_seconds,
        )


_cached: tuple[object, OutboxSettings] | None = None


def get_settings() -> OutboxSettings:
    """The current settings. Raises ConfigurationError with the key and what to write.

    The result is kept while `settings.OUTBOX` is the same object, so `override_settings` takes effect at once.
    """
    global _cached
    raw = getattr(django_settings, "OUTBOX", None)
    cached = _cached
    if cached is not None and cached[0] is raw:
        return cached[1]
    parsed = parse_settings({} if raw is None else raw)
    _cached = (raw, parsed)
    return parsed


def parse_settings(raw: object) -> OutboxSettings:
    """Check a settings dictionary. Raises ConfigurationError."""
    if not isinstance(raw, Mapping):
        raise ConfigurationError(f"OUTBOX must be a dictionary, not {type(raw).__name__}.")
    known = {item.name.upper(): item.name for item in fields(OutboxSettings)}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in known:
            raise ConfigurationError(f"OUTBOX[{key!r}] is not a setting.{setting_rules.nearest(str(key), list(known))}")
        values[known[key]] = _RULES[key](f"OUTBOX[{key!r}]", value)
    return _with_tasks_topic(OutboxSettings(**values))


def _with_tasks_topic(settings: OutboxSettings) -> OutboxSettings:
    """Declare the topic of transactional Celery tasks, named after the service."""
    if settings.celery_app is None:
        return settings
    name = tasks_topic(settings)
    return replace(settings, topics={name: _topic(f"OUTBOX['TOPICS'][{name!r}]", name, {}), **settings.topics})


def tasks_topic(settings: OutboxSettings) -> str:
    """The topic of the service's transactional Celery tasks. Raises ConfigurationError without PRODUCER_GROUP."""
    return f"{settings.required_producer_group()}.celery-tasks"


def _path(where: str, value: Any) -> PathChoice:
    if value not in list(PathChoice):
        raise setting_rules.wrong(where, value, f"one of {', '.join(map(repr, map(str, PathChoice)))}")
    return PathChoice(value)


def _topics(where: str, value: Any) -> Mapping[str, DeclaredTopic]:
    if not isinstance(value, Mapping):
        raise setting_rules.wrong(where, value, "a dictionary {name: {'types': [...], 'queue_count': 8}}")
    return {name: _topic(f"{where}[{name!r}]", name, options) for name, options in value.items()}


def _topic(where: str, name: str, options: Any) -> DeclaredTopic:
    if not isinstance(options, Mapping):
        raise setting_rules.wrong(
            where, options, "a dictionary like {'types': ['NORMAL', 'TRANSACTION'], 'queue_count': 8}"
        )
    for key in options:
        if key not in _TOPIC_RULES:
            raise ConfigurationError(
                f"{where}[{key!r}] is not an option.{setting_rules.nearest(str(key), list(_TOPIC_RULES))}"
            )
    given = {key: _TOPIC_RULES[key](f"{where}[{key!r}]", value) for key, value in options.items()}
    try:
        topic = Topic(
            name=name,
            types=given.get("types", frozenset({MessageType.NORMAL, MessageType.TRANSACTION})),
            queue_count=given.get("queue_count", DEFAULT_QUEUE_COUNT),
            key_lock=given.get("key_lock", True),
            on_park=given.get("on_park", "hold"),
            retention_seconds=given.get("retention_seconds", DEFAULT_RETENTION_SECONDS),
        )
    except (ConfigurationError, InvalidName) as error:
        raise ConfigurationError(f"{where}: {error}") from error
    return DeclaredTopic(topic=topic, codec=given.get("codec"), selector=given.get("selector"))


def _types(where: str, value: Any) -> frozenset[MessageType]:
    allowed = f"a list of {', '.join(map(repr, map(str, MessageType)))}"
    if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
        raise setting_rules.wrong(where, value, allowed)
    unknown = [item for item in value if item not in list(MessageType)]
    if unknown or not value:
        raise setting_rules.wrong(where, value, allowed)
    return frozenset(MessageType(item) for item in value)


_TOPIC_RULES: Final[Mapping[str, setting_rules.Rule]] = {
    "types": _types,
    "queue_count": setting_rules.whole(1),
    "codec": setting_rules.text_or_none,
    "selector": setting_rules.text_or_none,
    "key_lock": setting_rules.flag,
    "on_park": setting_rules.text,
    "retention_seconds": setting_rules.whole(1),
}

_RULES: Final[Mapping[str, setting_rules.Rule]] = {
    "IN_MEMORY": setting_rules.flag,
    "BROKER": setting_rules.text,
    "SCHEMA": setting_rules.schema,
    "LISTEN_URL": setting_rules.listen,
    "PRODUCER_GROUP": setting_rules.group,
    "PATH": _path,
    "TOPICS": _topics,
    "CODEC": setting_rules.text_or_none,
    "SUBSCRIBER_MODULE": setting_rules.module,
    "AUTO_CREATE_TOPICS": setting_rules.flag,
    "REQUIRE_TRANSACTION": setting_rules.flag,
    "SEND_TIMEOUT_SECONDS": setting_rules.seconds(0.05),
    "LEDGER": setting_rules.flag,
    "IMMUNITY_SECONDS": setting_rules.whole(0),
    "CHECK_INTERVAL_SECONDS": setting_rules.seconds(0.1),
    "CHECK_RETRY_SECONDS": setting_rules.whole(1),
    "MAX_CHECKS": setting_rules.whole(1),
    "MAX_CHECK_AGE_SECONDS": setting_rules.whole(1),
    "INBOX_RETENTION_SECONDS": setting_rules.seconds(60),
    "CONSUMER_PROCESSES": setting_rules.whole(0),
    "BROKER_APART": setting_rules.flag,
    "LEASE_SECONDS": setting_rules.seconds(1),
    "DRAIN_SECONDS": setting_rules.seconds(0),
    "CELERY_APP": setting_rules.text_or_none,
    "THRESHOLDS": setting_rules.thresholds,
    "AUDIT_INTERVAL_SECONDS": setting_rules.seconds(1),
    "TRACING": setting_rules.flag,
    "METRICS": setting_rules.flag,
    "METRICS_TOKEN": setting_rules.text_or_none,
    "HEALTH_DIRECTORY": setting_rules.text_or_none,
    "HEALTH_ADDRESS": setting_rules.address,
    "FORWARD": forwards,
    "RECEIVE": receives,
    "MASKED_FIELDS": setting_rules.masked_fields,
}


def imported(where: str, dotted_path: str) -> Any:
    """The object of a dotted path in the settings; ConfigurationError with the setting if it does not exist."""
    try:
        return import_string(dotted_path)
    except ImportError as error:
        raise ConfigurationError(f"{where} = {dotted_path!r} cannot be imported: {error}.") from error
