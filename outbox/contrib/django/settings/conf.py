"""All settings of outbox. This module defines each setting once.

    OUTBOX = {
        "BROKER": "broker",                     # alias of the broker's database (default: DEFAULT_DB_ALIAS)
        "PRODUCER_GROUP": "orders",             # answers check-backs; unique per service, no default
        "TOPICS": {"order-paid": {"types": ["FIFO", "TRANSACTION"], "queue_count": 8}},
    }

Every key of OUTBOX is the name of a field of `OutboxSettings` in capitals. The keys of nested dictionaries are names of
fields of `TopicOptions`, and those of THRESHOLDS are names of declared thresholds. Parts add keys of their own
(`hooks.add_settings`). After a change to a definition, run `python -m tests.house.tables`, which writes the tables in
the documents.
"""

from __future__ import annotations

import enum
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, TypeVar

from django.apps import apps
from django.conf import settings as django_settings
from django.db import DEFAULT_DB_ALIAS, connections
from django.utils import timezone
from django.utils.module_loading import import_string

from outbox import contrib, hooks, names
from outbox.broker.operations.conditions import Thresholds
from outbox.contrib.django.settings.definition import (
    Rule,
    address,
    any_text,
    definitions,
    dotted_path,
    entries,
    field_names,
    flag,
    group,
    listen_conninfo,
    members,
    one_of,
    or_none,
    paths,
    read,
    read_together,
    schema_name,
    seconds,
    setting,
    text,
    whole,
    wrong,
)
from outbox.errors import ConfigurationError, InvalidName
from outbox.subscription import DEFAULT_THREADS
from outbox.topic import MessageType, Topic
from outbox.transaction import CheckSettings

Entry = TypeVar("Entry")

_DAY: Final = 24 * 3600.0

# -- OUTBOX["TOPICS"][name] ------------------------------------------------------------------------

_TOPIC: Final[Mapping[str, Any]] = {item.name: item.default for item in fields(Topic)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicOptions:
    types: frozenset[MessageType] = setting(
        _TOPIC["types"],
        members(MessageType),
        shown="`NORMAL`, `TRANSACTION`",
        meaning="the types of messages that the topic accepts",
    )
    queue_count: int = setting(
        _TOPIC["queue_count"],
        whole(1, "queues"),
        meaning="number of queues, and so the maximum number of consumer processes of one group that share the topic",
    )
    retention_seconds: int = setting(
        _TOPIC["retention_seconds"],
        whole(1, "seconds"),
        meaning="how long the log keeps messages that all groups have consumed; other messages stay at least thirty "
        "days",
    )
    codec: str | None = setting(None, dotted_path, meaning="codec of the topic's bodies")
    key_lock: bool = setting(
        _TOPIC["key_lock"],
        flag,
        meaning="FIFO topics: a transaction that publishes a key waits until earlier transactions of this key have "
        "ended",
    )
    on_park: str = setting(
        _TOPIC["on_park"],
        one_of("hold", "release"),
        meaning="FIFO topics: if a message is [parked](concepts/messages.md#parked-messages), later messages of the "
        "same key wait (`hold`) or are delivered (`release`)",
    )
    backlog_limit: int | None = setting(
        _TOPIC["backlog_limit"],
        or_none(whole(1, "messages", most=2**63 - 1)),
        meaning="the greatest number of messages that a group may be behind "
        "([limits](operations/sizing.md#limits-of-the-backlog))",
    )
    on_limit: str = setting(
        _TOPIC["on_limit"],
        one_of("refuse", "warn"),
        meaning="while the limit is exceeded, `publish` raises an error (`refuse`) or logs a warning (`warn`)",
    )
    searchable: bool = setting(
        _TOPIC["searchable"],
        flag,
        meaning="`True`: the log has an index of the topic's keys "
        "([search by key](operations/messages.md#search-by-key))",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredTopic:
    """One entry of TOPICS. `codec` is a dotted path, which is imported at its first use."""

    topic: Topic
    codec: str | None = None


def _topic(where: str, name: str, given: object) -> DeclaredTopic:
    options = read(TopicOptions, where, given)
    try:
        topic = Topic(name=name, **{one: getattr(options, one) for one in _TOPIC if one != "name"})
    except (ConfigurationError, InvalidName) as error:
        raise ConfigurationError(f"{where}: {error}") from error
    return DeclaredTopic(topic=topic, codec=options.codec)


# -- OUTBOX["THRESHOLDS"] --------------------------------------------------------------------------


def _thresholds(where: str, value: Any) -> Thresholds:
    """Return the thresholds that a project has changed. `check` and the status refuse names that no condition has."""
    if not isinstance(value, Mapping):
        raise wrong(where, value, "a dictionary like {'LAG_SECONDS': (60, 600)}: warning and critical, None for never")
    return {str(name).lower(): _limits(f"{where}[{name!r}]", pair) for name, pair in value.items()}


def _limits(where: str, value: Any) -> tuple[float | None, float | None]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise wrong(where, value, "a pair (warning, critical) of numbers, None for never")
    for one in value:
        if one is not None and not names.is_seconds(one, 2**63):
            raise wrong(where, value, "a pair (warning, critical) of numbers, at least 0, None for never")
    return (value[0], value[1])


# -- OUTBOX ----------------------------------------------------------------------------------------


class EngineName(enum.StrEnum):
    """The engines of the core. The name of an engine that a part adds is the scheme of its addresses."""

    POSTGRES = "postgres"
    """The engine if `BROKER` is an alias of DATABASES."""
    MEMORY = "memory"
    """The engine if `IN_MEMORY` is on."""


_SCHEME_END: Final = "://"


def _broker(where: str, value: object) -> str:
    """Return the alias or the address. Raises ConfigurationError if no installed part has an engine for the address."""
    broker = any_text.check(where, value)
    scheme, separator, _ = broker.partition(_SCHEME_END)
    if separator and scheme not in hooks.engines:
        part = f"{contrib.__name__}.{scheme}"
        is_there = scheme.isidentifier() and find_spec(part) is not None and find_spec(f"{part}.engine") is not None
        remedy = f"add {part!r} to INSTALLED_APPS" if is_there else "write an alias of DATABASES"
        # The error does not show the rest of the address, because it may contain a password.
        raise ConfigurationError(f"{where} = '{scheme}{_SCHEME_END}…' is the address of no installed engine: {remedy}.")
    return broker


@dataclass(frozen=True, kw_only=True, slots=True)
class OutboxSettings:
    """The checked settings of a project. All times are in seconds."""

    broker: str = setting(
        DEFAULT_DB_ALIAS,
        Rule("alias or address", _broker),
        meaning="alias of the broker's database (PostgreSQL 15 or newer), or address of [another broker](engines.md)",
        section="broker",
    )
    schema: str = setting("outbox", schema_name, bundled_only=True, meaning="schema of the broker's tables")
    listen_url: str | None = setting(
        None,
        listen_conninfo,
        bundled_only=True,
        secret=True,
        meaning="URL of a direct connection, if the alias uses a [pooler](operations/connections.md#behind-a-pooler). "
        'With `""`, outbox polls and does not use LISTEN',
    )
    topics: Mapping[str, DeclaredTopic] = setting(
        {},
        entries(_topic, name="name", example="{name: {'types': [...], 'queue_count': 8}}"),
        meaning="the declared topics and their [options](settings.md#topics)",
    )
    codec: str | None = setting(
        None,
        dotted_path,
        shown="JSON",
        meaning="class or object that encodes bodies, for topics without a `codec` of their own",
    )
    in_memory: bool = setting(False, flag, meaning="`True`: a broker inside this process, for tests")

    producer_group: str = setting(
        "",
        group,
        shown="none",
        meaning="the name of this service, unique among the services on the broker. Only processes of this service "
        "answer check-backs of its transactions",
        section="publishing",
    )
    send_timeout_seconds: float = setting(3.0, seconds(0.05), meaning="how long `publish` waits for the broker")
    immunity_seconds: int = setting(
        6,
        whole(0, "seconds"),
        meaning="the age at which an undecided message is first checked",
    )
    check_interval_seconds: float = setting(
        30.0,
        seconds(0.1),
        meaning="time between two check-back passes. After an answer without an outcome, a message is checked again "
        "when twice this time has passed",
    )
    max_check_age_seconds: int = setting(
        int(3 * _DAY),
        whole(1, "seconds"),
        bundled_only=True,
        meaning="how long after `IMMUNITY_SECONDS` an undecided message is checked; then it is "
        "[parked](concepts/messages.md#parked-messages)",
    )

    celery_app: str | None = setting(
        None,
        dotted_path,
        meaning="the Celery app that gets [transactional tasks](celery.md#transactional-tasks)",
        section="consuming",
    )
    consumer_processes: int = setting(1, whole(0, "processes"), meaning="consumer processes of one worker")
    handler_threads: int = setting(
        DEFAULT_THREADS,
        whole(1, "threads"),
        meaning="handler threads of one consumer process, which all its subscribers share. Each thread needs a "
        "[database session](operations/connections.md). A subscriber with `threads` above 8 raises the number",
    )
    lease_seconds: float = setting(
        10.0,
        seconds(1),
        meaning="how long a queue stays with a consumer that has died. A handler may wait for a lock for half of this "
        "time, and leave its transaction idle for four fifths of this time",
    )
    drain_seconds: float = setting(
        20.0,
        seconds(0),
        meaning="how long the processes of a stopping worker may take to finish their work before the worker kills "
        "them",
    )
    messages_per_commit: int = setting(
        16,
        whole(1, "messages", 32),
        bundled_only=True,
        meaning="how many messages a worker may handle [in one transaction]"
        "(handlers.md#several-messages-in-one-transaction). 1: each message has a transaction of its own",
    )
    handler_middleware: Sequence[str] = setting(
        (),
        paths,
        shown="`[]`",
        meaning="[functions that wrap every handler call](hooks.md#middleware-around-handlers), the outermost first",
    )
    inbox_retention_seconds: float = setting(
        14 * _DAY,
        # The ids of transactions begin in 1970.
        seconds(60, most=20 * names.MAX_DELAY_SECONDS),
        meaning="the minimum time for which the inbox remembers a handled message. The inbox also remembers each "
        "message that is still in the log",
    )

    thresholds: Thresholds = setting(
        {},
        Rule("`{name: (warning, critical)}`", _thresholds),
        shown="[see operations](operations/monitoring.md#thresholds)",
        meaning="the limits at which a condition becomes a warning or critical",
        section="observing",
    )
    status_token: str | None = setting(
        None,
        or_none(any_text),
        secret=True,
        meaning="a request with this token in `Authorization: Bearer` may read `status/` and "
        "[`metrics/`](operations/monitoring.md#metrics) without an account",
    )
    health_directory: str | None = setting(
        None,
        or_none(text("path")),
        meaning="folder for the heartbeats of a worker's processes, and for data of optional apps, such as metrics",
    )
    health_address: str | None = setting(
        None,
        address,
        meaning='address (`"0.0.0.0:9464"`) at which an additional process serves `/live`, `/ready`, and paths of '
        "optional apps, such as `/metrics`",
    )
    masked_fields: Mapping[str, frozenset[str]] = setting(
        {},
        field_names,
        meaning='for each topic (`"*"`: for all topics), the fields of bodies and headers that commands and the '
        "[operations page](operations/page.md) hide",
    )

    def required_producer_group(self) -> str:
        """Return the producer group. Raises ConfigurationError if PRODUCER_GROUP is not set."""
        if not self.producer_group:
            raise ConfigurationError(
                "OUTBOX['PRODUCER_GROUP'] is not set: set a name for this service, for example 'orders', that no other "
                "service on the broker uses. The broker asks this group for the outcome of its transactions."
            )
        return self.producer_group

    @property
    def engine(self) -> str:
        """The name of the engine that `in_memory` and `broker` choose: one of `EngineName`, or of `hooks.engines`."""
        if self.in_memory:
            return EngineName.MEMORY
        return EngineName.POSTGRES if self.has_database else self.broker.partition(_SCHEME_END)[0]

    @property
    def has_database(self) -> bool:
        """Whether the broker is the bundled broker, in the database of the alias `broker`."""
        return not self.in_memory and _SCHEME_END not in self.broker

    @property
    def check(self) -> CheckSettings:
        """The settings that determine when the broker checks a half message, and when it parks the message."""
        return CheckSettings(
            immunity_seconds=self.immunity_seconds,
            # A check that answered UNKNOWN is asked again by the pass after the next one.
            recheck_seconds=2 * self.check_interval_seconds,
            max_age_seconds=self.max_check_age_seconds,
        )


# Settings, and those of the parts, behind the two values from which they were read: settings.OUTBOX and `forced_keys`.
SettingsRead = tuple[object, object, OutboxSettings, Mapping[type, Any]]

_cached: SettingsRead | None = None
# Keys that replace those of settings.OUTBOX while test helpers are in use (outbox.contrib.django.testing).
forced_keys: Mapping[str, Any] | None = None


@contextmanager
def forced(keys: Mapping[str, Any]) -> Iterator[None]:
    """Let these keys apply inside the block, also if a test replaces settings.OUTBOX meanwhile."""
    global forced_keys
    before = forced_keys
    forced_keys = {**(before or {}), **keys}
    try:
        yield
    finally:
        forced_keys = before


def get_settings() -> OutboxSettings:
    """Return the current settings. Raises ConfigurationError, which names the wrong key and the allowed values.

    It checks the dictionary again if `settings.OUTBOX` is a new object, as in `override_settings`.
    """
    return read_settings()[2]


def read_settings() -> SettingsRead:
    """Like `get_settings`, but return also the values from which the settings were read."""
    cached = _cached
    if cached is not None and cached[0] is getattr(django_settings, "OUTBOX", None) and cached[1] is forced_keys:
        return cached
    return _read_again()


def settings_of(kind: type[Entry]) -> Entry:
    """Return the current settings of a part, whose class the part has added with `hooks.add_settings`."""
    found: Entry = read_settings()[3][kind]
    return found


def refused_settings_of_parts() -> Iterator[str]:
    """Return a text for each setting of a part that engines other than the bundled broker refuse, and that is set."""
    for kind in hooks.settings.values():
        current: Any = settings_of(kind)
        for attribute, one in definitions(kind).items():
            if isinstance(one.bundled_only, str) and getattr(current, attribute) != one.default:
                yield f"OUTBOX[{one.name!r}] needs the bundled broker: {one.bundled_only}"


def _read_again() -> SettingsRead:
    global _cached
    raw, keys = getattr(django_settings, "OUTBOX", None), forced_keys
    given = {} if raw is None else raw
    settings, of_parts = _parse(given if keys is None else {"PRODUCER_GROUP": "tests", **given, **keys})
    _cached = (raw, keys, settings, of_parts)
    return _cached


def parse_settings(raw: object) -> OutboxSettings:
    """Check a settings dictionary, also the keys of parts. Raises ConfigurationError."""
    return _parse(raw)[0]


def _parse(raw: object) -> tuple[OutboxSettings, Mapping[type, Any]]:
    if not apps.apps_ready:
        _load_parts()
    settings, *of_parts = read_together((OutboxSettings, *hooks.settings.values()), "OUTBOX", raw, elsewhere=_of_part)
    if settings.celery_app is not None:
        # The calls of transactional Celery tasks need a topic, so add this topic to the declared topics.
        name = tasks_topic(settings)
        own = _topic(f"OUTBOX['TOPICS'][{name!r}]", name, {})
        settings = replace(settings, topics={name: own, **settings.topics})
    return settings, {type(one): one for one in of_parts}


def _load_parts() -> None:
    """Let the parts add their settings, because a Celery app may need them before Django has loaded the apps."""
    for app in django_settings.INSTALLED_APPS:
        if app.startswith(f"{contrib.__name__}.") and find_spec(f"{app}.apps") is not None:
            import_module(f"{app}.apps")


def _of_part(key: str) -> str | None:
    """Return the remedy for a key that only a part has which is not installed; None for a key that no part has."""
    for part in pkgutil.iter_modules(contrib.__path__, f"{contrib.__name__}."):
        if find_spec(part.name) is None or find_spec(f"{part.name}.settings") is None:
            continue
        module = import_module(f"{part.name}.settings")
        own = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
        # The options of an entry are dataclasses too, whose names are in small letters.
        if str(key).isupper() and any(
            key in (one.name for one in definitions(kind).values()) for kind in own if is_dataclass(kind)
        ):
            return f"add {part.name!r} to INSTALLED_APPS, because this setting belongs to that part"
    return None


def tasks_topic(settings: OutboxSettings) -> str:
    """Return the topic of the service's Celery tasks. Raises ConfigurationError if PRODUCER_GROUP is not set."""
    return f"{settings.required_producer_group()}.celery-tasks"


def imported(where: str, dotted_path: str) -> Any:
    """Import the object at a dotted path in the settings. Raises ConfigurationError, which names the setting."""
    try:
        return import_string(dotted_path)
    except ImportError as error:
        raise ConfigurationError(f"{where} = {dotted_path!r} cannot be imported: {error}.") from error


def chosen(where: str, declared: Mapping[str, Entry], names: Sequence[str], purpose: str) -> dict[str, Entry]:
    """Return the declared entries with these names, or all if `names` is empty. Raises ConfigurationError."""
    if not declared:
        raise ConfigurationError(f"{where} declares nothing {purpose}.")
    if missing := sorted(set(names) - set(declared)):
        raise ConfigurationError(f"{where} has no {', '.join(missing)}; it has {', '.join(sorted(declared))}.")
    return {name: one for name, one in declared.items() if not names or name in names}


def made(where: str, kind: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Create an object of a class in the settings with its options. Raises ConfigurationError for wrong options."""
    try:
        return kind(**options)
    except TypeError as error:
        raise ConfigurationError(f"{where}['options'] are wrong: {error}.") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}['options']: {error}") from error


# -- USE_TZ ----------------------------------------------------------------------------------------


def aware(moment: datetime) -> datetime:
    """Return an aware time. Without USE_TZ, a naive time is in TIME_ZONE; with it, it is returned unchanged."""
    if moment.tzinfo is not None or django_settings.USE_TZ:
        return moment
    return timezone.make_aware(moment, timezone.get_default_timezone())


def for_column(moment: datetime, alias: str) -> datetime:
    """Return an aware time in the form that DateTimeFields on `alias` need.

    Without USE_TZ, another database than PostgreSQL needs the naive time in UTC, as its CURRENT_TIMESTAMP is.
    """
    if django_settings.USE_TZ or connections[alias].vendor == "postgresql":
        return moment
    return moment.astimezone(UTC).replace(tzinfo=None)
