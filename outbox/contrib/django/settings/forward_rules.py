"""The rules of OUTBOX['FORWARD']: which topics a group forwards, to which sink, in which format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from outbox.contrib.django.settings import setting_rules
from outbox.contrib.sinks import formats
from outbox.errors import ConfigurationError, InvalidFilter
from outbox.filters.filter import parse_filter
from outbox.subscription import Start

SINKS: Final[Mapping[str, str]] = {
    "webhook": "outbox.contrib.sinks.webhook.WebhookSink",
    "kombu": "outbox.contrib.sinks.kombu.KombuSink",
    "kafka": "outbox.contrib.sinks.kafka.KafkaSink",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredForward:
    """One entry of FORWARD. `topics` maps the names here to those at the sink; `options` are the sink's own.

    `start`: where the group begins on a topic that is new to it. None: at the earliest message, with a warning if other
    groups have handled messages of the topic.
    """

    topics: Mapping[str, str]
    sink: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    format: str = formats.PLAIN
    source: str = ""
    filter: str = ""
    dead_letter: bool = False
    batch: int | None = None
    threads: int | None = None
    timeout_seconds: float = 120.0
    suspend_seconds: float = 5.0
    start: Start | None = None


def forwards(where: str, value: Any) -> Mapping[str, DeclaredForward]:
    """The declarations by group. Raises ConfigurationError."""
    return setting_rules.by_name(where, value, "{group: {'topics': [...], 'sink': 'webhook', ...}}", _forward)


def _forward(where: str, value: Any) -> DeclaredForward:
    given = setting_rules.options_of(where, value, _RULES, required=("topics", "sink"))
    dead_letter = given.pop("on_rejected", False)
    return DeclaredForward(dead_letter=dead_letter, **given)


def _topics(where: str, value: Any) -> Mapping[str, str]:
    if isinstance(value, (list, tuple)) and value and all(isinstance(name, str) for name in value):
        return {name: name for name in value}
    if isinstance(value, Mapping) and value and all(isinstance(name, str) for pair in value.items() for name in pair):
        return dict(value)
    raise setting_rules.wrong(where, value, "a list of topics, or a dictionary {topic: its name there}")


def _sink(where: str, value: Any) -> str:
    return setting_rules.path_or_one_of(where, value, SINKS)


def _format(where: str, value: Any) -> str:
    if value not in formats.NAMES:
        raise setting_rules.wrong(where, value, f"one of {', '.join(map(repr, formats.NAMES))}")
    return str(value)


def _filter(where: str, value: Any) -> str:
    try:
        parse_filter(setting_rules.text(where, value))
    except InvalidFilter as error:
        raise ConfigurationError(f"{where}: {error}") from error
    return str(value)


def _start(where: str, value: Any) -> Start:
    if value not in list(Start):
        raise setting_rules.wrong(where, value, f"one of {', '.join(map(repr, map(str, Start)))}")
    return Start(value)


def _on_rejected(where: str, value: Any) -> bool:
    if value not in ("block", "dead_letter"):
        raise setting_rules.wrong(where, value, "'block' (its key waits) or 'dead_letter' (later ones overtake it)")
    return bool(value == "dead_letter")


_RULES: Final[Mapping[str, setting_rules.Rule]] = {
    "topics": _topics,
    "sink": _sink,
    "options": setting_rules.keywords,
    "format": _format,
    "source": setting_rules.text,
    "filter": _filter,
    "on_rejected": _on_rejected,
    "batch": setting_rules.whole(1),
    "threads": setting_rules.whole(1),
    "timeout_seconds": setting_rules.seconds(1),
    "suspend_seconds": setting_rules.seconds(0),
    "start": _start,
}
