"""The setting RECEIVE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from outbox.contrib.django.settings.definition import (
    dotted_path,
    entries,
    group,
    keywords,
    named_or_path,
    or_none,
    read,
    required,
    setting,
    text,
    whole,
)

SOURCES: Final[Mapping[str, str]] = {
    "kombu": "outbox.contrib.receiving.sources.kombu.KombuSource",
    "kafka": "outbox.contrib.receiving.sources.kafka.KafkaSource",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredReceive:
    """One entry of RECEIVE. `convert` is a dotted path, which is imported at its first use."""

    source: str = required(
        named_or_path(SOURCES),
        meaning="where the messages come from: a built-in source, or the dotted path of your class",
    )
    topic: str = required(
        text("topic"), meaning="the topic of outbox that gets the received messages; declare it in `TOPICS`"
    )
    options: Mapping[str, Any] = setting(
        {}, keywords, secret=True, meaning="the options of the source; the next table lists them"
    )
    batch: int = setting(100, whole(1, "messages"), meaning="the maximum number of messages that one statement stores")
    poison_topic: str | None = setting(
        None, or_none(text("topic")), meaning="the topic for messages that cannot be stored in `topic`"
    )
    convert: str | None = setting(
        None,
        dotted_path,
        meaning="a function `(Incoming, name, topic) -> Message` that makes the message. The text below the tables "
        "describes the default function",
    )


def _entry(where: str, name: str, given: object) -> DeclaredReceive:
    group.check(where, name)
    return read(DeclaredReceive, where, given)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiveSettings:
    """The keys of OUTBOX that are about receiving."""

    receive: Mapping[str, DeclaredReceive] = setting(
        {},
        entries(_entry, name="name", example="{name: {'source': 'kombu', 'topic': …}}"),
        bundled_only="another broker would store a repeated message a second time. Keep the topics on PostgreSQL, run "
        "outbox_worker --role receive with settings whose BROKER is the alias of this PostgreSQL database, and declare "
        "RECEIVE in these settings only; or let the sender publish to the other broker.",
        meaning="the sources from which `outbox_worker --role receive` [receives messages](forwarding.md#receive)",
        section="broker",
    )
