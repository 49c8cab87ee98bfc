"""The setting `OUTBOX`: read when needed, checked once, never frozen at import.

    OUTBOX = {
        "BROKER": "broker",                     # alias of the broker's database (default: DEFAULT_DB_ALIAS)
        "PRODUCER_GROUP": "orders",             # who answers check-backs; unique per service, no default
        "TOPICS": {"order-paid": {"types": ["FIFO", "TRANSACTION"], "queue_count": 8}},
    }

Every key is a field of `OutboxSettings` in capitals.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypeVar

from django.conf import settings as django_settings
from django.db import DEFAULT_DB_ALIAS
from django.utils.module_loading import import_string

from outbox import names
from outbox.broker.database.conninfo import read_conninfo
from outbox.broker.database.statement import check_schema_name
from outbox.broker.operations.thresholds import Limits, Thresholds
from outbox.errors import ConfigurationError, InvalidName
from outbox.safe_text import mask_passwords
from outbox.topic import DEFAULT_QUEUE_COUNT, DEFAULT_RETENTION_SECONDS, MessageType, Topic
from outbox.transaction import CheckSettings

Value = TypeVar("Value")

_DAY: Final = 24 * 3600.0


class PathChoice(enum.StrEnum):
    """How a transactional publish reaches the broker."""

    AUTO = "auto"
    """Decided per live connection: atomic where it is connected to the broker's own database."""
    TWO_PHASE = "two_phase"
    """Always half message, local transaction, end message."""
    ATOMIC = "atomic"
    """Always through the application's own connection; an error where the broker is elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredTopic:
    """One entry of TOPICS. `codec` and `selector` are dotted paths, imported when first needed."""

    topic: Topic
    codec: str | None = None
    selector: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OutboxSettings:
    """The checked settings. Times are in seconds.

    `in_memory` replaces the broker by one in this process, for tests. `broker` is the alias of the broker's
    database, `schema` the schema of its tables, `listen_url` a direct connection string for LISTEN where the alias
    goes through a transaction pooler ('' does without LISTEN and polls). `producer_group` names this service for
    check-back: every process that can answer for its local transactions, and nobody else, uses it. `codec` is the
    dotted path of the codec of topics that name none (default: JSON), `subscriber_module` the module of each app that
    workers import. `ledger=False`
    goes without the ledger table: then every transactional message needs `check=`. `immunity_seconds`,
    `check_retry_seconds`, `max_checks` and `max_check_age_seconds` say when an undecided message is asked about,
    and when it is parked; `check_interval_seconds` is the period of the pass that asks. `require_transaction`
    refuses to publish outside of a transaction, whatever the topic. `inbox_retention_seconds` must outlast the log,
    all retries and the dead letters that may still be replayed. `lease_seconds` is the term of a queue's lease; a
    handler's connection gives up waiting for locks within half of it, and being idle in its transaction within four
    fifths, so that a frozen process blocks nobody. `drain_seconds` is what a worker's processes have to finish when it
    stops, before they are killed. `celery_app` is the dotted path of the Celery app that gets the transactional tasks.

    `thresholds` says from where on the status warns, `audit_interval_seconds` how often conservation is audited.
    `metrics` measures what each process does, for prometheus-client; who scrapes without being staff shows
    `metrics_token`. In `health_directory` a worker's processes leave signs of life and figures for metrics; a process
    more serves /live, /ready and /metrics at `health_address` (HOST:PORT).
    """

    in_memory: bool = False
    broker: str = DEFAULT_DB_ALIAS
    schema: str = "outbox"
    listen_url: str | None = field(default=None, repr=False)
    producer_group: str = ""
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
    lease_seconds: float = 10.0
    drain_seconds: float = 20.0
    celery_app: str | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    audit_interval_seconds: float = _DAY
    metrics: bool = False
    metrics_token: str | None = field(default=None, repr=False)
    health_directory: str | None = None
    health_address: str | None = None

    def required_producer_group(self) -> str:
        """The producer group; ConfigurationError when there is none."""
        if not self.producer_group:
            raise ConfigurationError(
                "OUTBOX['PRODUCER_GROUP'] is not set: name this service (for example 'orders'), unlike any other "
                "service that shares the broker. Check-back asks it for the outcome of its transactions."
            )
        return self.producer_group

    @property
    def check(self) -> CheckSettings:
        """When the broker asks about half messages, and when it parks them."""
        return CheckSettings(
            immunity_seconds=self.immunity_seconds,
            recheck_seconds=self.check_retry_seconds,
            max_checks=self.max_checks,
            max_age_seconds=self.max_check_age_seconds,
        )


_cached: tuple[object, OutboxSettings] | None = None


def get_settings() -> OutboxSettings:
    """The current settings. Raises ConfigurationError naming the key and what to write.

    The result is kept as long as `settings.OUTBOX` is the same object, so `override_settings` takes effect at once.
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
            raise ConfigurationError(f"OUTBOX[{key!r}] is not a setting.{_nearest(str(key), list(known))}")
        values[known[key]] = _RULES[key](f"OUTBOX[{key!r}]", value)
    return _with_tasks_topic(OutboxSettings(**values))


def _with_tasks_topic(settings: OutboxSettings) -> OutboxSettings:
    """Declare the topic of transactional Celery tasks, which takes its name from the service."""
    if settings.celery_app is None:
        return settings
    name = tasks_topic(settings)
    return replace(settings, topics={name: _topic(f"OUTBOX['TOPICS'][{name!r}]", name, {}), **settings.topics})


def tasks_topic(settings: OutboxSettings) -> str:
    """The topic of the service's transactional Celery tasks. Raises ConfigurationError without PRODUCER_GROUP."""
    return f"{settings.required_producer_group()}.celery-tasks"


def _nearest(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key.upper(), [name.upper() for name in known], n=1, cutoff=0.5)
    if near:
        spelled = next(name for name in known if name.upper() == near[0])
        return f" Did you mean {spelled!r}?"
    return f" The settings are {', '.join(sorted(known))}."


Rule = Callable[[str, Any], Any]


def _wrong(where: str, value: object, remedy: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where} must be {remedy}; it is {mask_passwords(repr(value))} ({type(value).__name__})."
    )


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(where, value, "a text that is not empty")
    return value


def _text_or_none(where: str, value: Any) -> str | None:
    return None if value is None else _text(where, value)


def _module(where: str, value: Any) -> str:
    if not isinstance(value, str) or not all(map(str.isidentifier, value.split("."))):
        raise _wrong(where, value, "the name of a module, like 'subscribers'")
    return value


def _listen(where: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _wrong(where, value, "a connection string, '' for no LISTEN at all, or None")
    read_conninfo(value or "", where)
    return value


def _group(where: str, value: Any) -> str:
    try:
        return names.check_group(value)
    except InvalidName as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _schema(where: str, value: Any) -> str:
    try:
        return check_schema_name(_text(where, value))
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(where, value, "True or False")
    return value


def _path(where: str, value: Any) -> PathChoice:
    if value not in list(PathChoice):
        raise _wrong(where, value, f"one of {', '.join(map(repr, map(str, PathChoice)))}")
    return PathChoice(value)


def _whole(minimum: int) -> Rule:
    def rule(where: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise _wrong(where, value, f"a whole number, at least {minimum}")
        return value

    return rule


def _seconds(minimum: float) -> Rule:
    def rule(where: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value < float("inf"):
            raise _wrong(where, value, f"a number of seconds, at least {minimum:g}")
        return float(value)

    return rule


def _topics(where: str, value: Any) -> Mapping[str, DeclaredTopic]:
    if not isinstance(value, Mapping):
        raise _wrong(where, value, "a dictionary {name: {'types': [...], 'queue_count': 8}}")
    return {name: _topic(f"{where}[{name!r}]", name, options) for name, options in value.items()}


def _topic(where: str, name: str, options: Any) -> DeclaredTopic:
    if not isinstance(options, Mapping):
        raise _wrong(where, options, "a dictionary like {'types': ['NORMAL', 'TRANSACTION'], 'queue_count': 8}")
    for key in options:
        if key not in _TOPIC_RULES:
            raise ConfigurationError(f"{where}[{key!r}] is not an option.{_nearest(str(key), list(_TOPIC_RULES))}")
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
        raise _wrong(where, value, allowed)
    unknown = [item for item in value if item not in list(MessageType)]
    if unknown or not value:
        raise _wrong(where, value, allowed)
    return frozenset(MessageType(item) for item in value)


def _address(where: str, value: Any) -> str | None:
    if value is None:
        return None
    host, _, port = _text(where, value).rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise _wrong(where, value, "HOST:PORT, like '0.0.0.0:9464', or None")
    return str(value)


def _thresholds(where: str, value: Any) -> Thresholds:
    if not isinstance(value, Mapping):
        raise _wrong(where, value, "a dictionary like {'LAG_SECONDS': (60, 600)}: warning and critical, None for never")
    known = {item.name.upper(): item.name for item in fields(Thresholds)}
    for key in value:
        if key not in known:
            raise ConfigurationError(f"{where}[{key!r}] is not a threshold.{_nearest(str(key), list(known))}")
    return Thresholds(**{known[key]: _limits(f"{where}[{key!r}]", pair) for key, pair in value.items()})


def _limits(where: str, value: Any) -> Limits:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise _wrong(where, value, "a pair (warning, critical) of numbers, None for never")
    for one in value:
        if one is not None and (isinstance(one, bool) or not isinstance(one, (int, float)) or one < 0):
            raise _wrong(where, value, "a pair (warning, critical) of numbers from 0 on, None for never")
    return Limits(*value)


_TOPIC_RULES: Final[Mapping[str, Rule]] = {
    "types": _types,
    "queue_count": _whole(1),
    "codec": _text_or_none,
    "selector": _text_or_none,
    "key_lock": _flag,
    "on_park": _text,
    "retention_seconds": _whole(1),
}

_RULES: Final[Mapping[str, Rule]] = {
    "IN_MEMORY": _flag,
    "BROKER": _text,
    "SCHEMA": _schema,
    "LISTEN_URL": _listen,
    "PRODUCER_GROUP": _group,
    "PATH": _path,
    "TOPICS": _topics,
    "CODEC": _text_or_none,
    "SUBSCRIBER_MODULE": _module,
    "AUTO_CREATE_TOPICS": _flag,
    "REQUIRE_TRANSACTION": _flag,
    "SEND_TIMEOUT_SECONDS": _seconds(0.05),
    "LEDGER": _flag,
    "IMMUNITY_SECONDS": _whole(0),
    "CHECK_INTERVAL_SECONDS": _seconds(0.1),
    "CHECK_RETRY_SECONDS": _whole(1),
    "MAX_CHECKS": _whole(1),
    "MAX_CHECK_AGE_SECONDS": _whole(1),
    "INBOX_RETENTION_SECONDS": _seconds(60),
    "CONSUMER_PROCESSES": _whole(0),
    "LEASE_SECONDS": _seconds(1),
    "DRAIN_SECONDS": _seconds(0),
    "CELERY_APP": _text_or_none,
    "THRESHOLDS": _thresholds,
    "AUDIT_INTERVAL_SECONDS": _seconds(1),
    "METRICS": _flag,
    "METRICS_TOKEN": _text_or_none,
    "HEALTH_DIRECTORY": _text_or_none,
    "HEALTH_ADDRESS": _address,
}


def imported(where: str, dotted_path: str) -> Any:
    """What a dotted path in the settings names; ConfigurationError naming the setting when it is not there."""
    try:
        return import_string(dotted_path)
    except ImportError as error:
        raise ConfigurationError(f"{where} = {dotted_path!r} cannot be imported: {error}.") from error
