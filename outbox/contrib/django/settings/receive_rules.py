"""The rules of OUTBOX['RECEIVE']: which source's messages go into which topic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from outbox.contrib.django.settings import setting_rules

SOURCES: Final[Mapping[str, str]] = {
    "kombu": "outbox.contrib.sources.kombu.KombuSource",
    "kafka": "outbox.contrib.sources.kafka.KafkaSource",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredReceive:
    """One entry of RECEIVE. `options` are the source's own; `convert` is a dotted path, imported when needed."""

    topic: str
    source: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    poison_topic: str | None = None
    convert: str | None = None
    batch: int = 100


def receives(where: str, value: Any) -> Mapping[str, DeclaredReceive]:
    """The declarations by name. Raises ConfigurationError."""
    return setting_rules.by_name(where, value, "{name: {'source': 'kombu', 'topic': …}}", _receive)


def _receive(where: str, value: Any) -> DeclaredReceive:
    return DeclaredReceive(**setting_rules.options_of(where, value, _RULES, required=("source", "topic")))


def _source(where: str, value: Any) -> str:
    return setting_rules.path_or_one_of(where, value, SOURCES)


_RULES: Final[Mapping[str, setting_rules.Rule]] = {
    "topic": setting_rules.text,
    "source": _source,
    "options": setting_rules.keywords,
    "poison_topic": setting_rules.text_or_none,
    "convert": setting_rules.text_or_none,
    "batch": setting_rules.whole(1),
}
