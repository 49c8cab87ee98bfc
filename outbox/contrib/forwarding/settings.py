"""The setting FORWARD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from outbox import names
from outbox.contrib.django.settings.definition import (
    Rule,
    any_text,
    entries,
    group,
    keywords,
    member,
    named_or_path,
    one_of,
    read,
    required,
    seconds,
    setting,
    text,
    whole,
    wrong,
)
from outbox.contrib.forwarding.sinks import formats
from outbox.errors import ConfigurationError, InvalidFilter
from outbox.filters.filter import parse_filter
from outbox.subscription import Start

SINKS: Final[Mapping[str, str]] = {
    "webhook": "outbox.contrib.forwarding.sinks.webhook.WebhookSink",
    "kombu": "outbox.contrib.forwarding.sinks.kombu.KombuSink",
    "kafka": "outbox.contrib.forwarding.sinks.kafka.KafkaSink",
}
BLOCK: Final = "block"
DEAD_LETTER: Final = "dead_letter"


def _names_there(where: str, value: Any) -> Mapping[str, str]:
    if isinstance(value, (list, tuple)) and value and all(isinstance(name, str) for name in value):
        return {str.__str__(name): str.__str__(name) for name in value}
    if isinstance(value, Mapping) and value and all(isinstance(name, str) for pair in value.items() for name in pair):
        return {str.__str__(name): str.__str__(there) for name, there in value.items()}
    raise wrong(where, value, "a list of topics, or a dictionary {topic: name of the topic at the receiver}")


def _filter(where: str, value: Any) -> str:
    expression = any_text.check(where, value)
    try:
        parse_filter(expression)
    except InvalidFilter as error:
        raise ConfigurationError(f"{where}: {error}") from error
    return expression


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredForward:
    """One entry of FORWARD. `topics` maps the topic names of this broker to the topic names at the sink."""

    topics: Mapping[str, str] = required(
        Rule("`[topic]` or `{topic: name}`", _names_there),
        meaning="the topics whose messages are sent; a dictionary also gives the name of each topic at the receiver",
    )
    sink: str = required(
        named_or_path(SINKS),
        meaning="where the messages go: a built-in sink, or the dotted path of [your class](#a-sink-of-your-own)",
    )
    options: Mapping[str, Any] = setting(
        {}, keywords, secret=True, meaning="the options of the sink; the section about the sink lists them"
    )
    filter: str = setting(
        "",
        Rule("filter", _filter),
        shown="all",
        meaning='sends only messages with one of these tags (`"paid \\|\\| refunded"`) or, after `sql:`, only messages '
        "whose headers match the expression",
    )
    format: str = setting(
        formats.PLAIN,
        one_of(*formats.NAMES),
        meaning="[format](#formats) of body and metadata; CloudEvents need the extra `cloudevents`",
    )
    source: str = setting(
        "",
        text("URI reference"),
        meaning="the attribute `source` of CloudEvents, which names the publisher, like `/shops/orders`",
    )
    on_rejected: str = setting(
        BLOCK,
        one_of(
            BLOCK,
            DEAD_LETTER,
            because="'block' (later messages of its key wait) or 'dead_letter' (later messages are sent)",
        ),
        meaning="if the endpoint refuses a message, later messages of its key wait (`block`), or the message becomes "
        "a dead letter and later messages are sent (`dead_letter`)",
    )
    batch: int | None = setting(
        None,
        whole(1, "messages", most=names.MAX_CALLS),
        shown="the sink's",
        meaning="the maximum number of messages in one call of the sink",
    )
    threads: int | None = setting(
        None,
        whole(1, "calls", most=names.MAX_CALLS),
        shown="the sink's",
        meaning="how many calls of the sink run at the same time",
    )
    suspend_seconds: float = setting(
        5.0, seconds(0), meaning="the wait until `outbox_worker --role forward` sends a refused message again"
    )
    timeout_seconds: float = setting(
        120.0, seconds(1), meaning="a call of the sink that lasts longer than this time counts as failed"
    )
    start: Start | None = setting(
        None,
        member(Start),
        shown='`"earliest"`',
        meaning="whether a group that is new to a topic begins at the oldest or the newest message. Without `start`, "
        "`manage.py check` and the worker warn if other groups have already handled messages of the topic",
    )


def _of_group(where: str, name: str, given: object) -> DeclaredForward:
    group.check(where, name)
    return read(DeclaredForward, where, given)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardSettings:
    """The keys of OUTBOX that are about forwarding."""

    forward: Mapping[str, DeclaredForward] = setting(
        {},
        entries(_of_group, name="group", example="{group: {'topics': [...], 'sink': 'webhook', ...}}"),
        bundled_only="a failing message would hold back its whole queue and not only its key. Keep the topics on "
        "PostgreSQL, run outbox_worker --role forward with settings whose BROKER is the alias of this PostgreSQL "
        "database, and declare FORWARD in these settings only; or let a @subscriber send the messages.",
        meaning="for each consumer group, the messages that `outbox_worker --role forward` [sends to another "
        "system](forwarding.md)",
        section="broker",
    )
