"""The events of the project: versions, fields, publishers, readers, and the newest messages of each version."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers.registry import Subscriber, subscribers
from outbox.events.asyncapi import example
from outbox.events.declaration import EVENT_HEADER, VERSION_HEADER, EventType, find_event, leads_to, versions_of
from outbox.events.fields import EventField, fields_of
from outbox.utils.safe_text import masked_names, masked_value

# The number of newest messages in which `last seen` looks. The log has no index by event.
LOOKED_AT: Final = 1_000
# A longer text in the header is no version, and Python refuses to read thousands of digits.
_LONGEST_VERSION: Final = 18

# The log has no index by event, so only a fixed number of rows is read, backwards along the primary key.
_SEEN: Final = Statement("""
SELECT topic.name AS topic, coalesce(left(event, 200), '') AS event, coalesce(left(version, 200), '') AS version,
       coalesce(newest.producer_group, '') AS producer_group, count(*) AS messages, max(stored_at) AS last_at,
       (array_agg(message_id ORDER BY log_id DESC))[1] AS last_message_id
FROM (SELECT log_id, topic_id, transaction_id, message_id, stored_at, producer_group,
             headers ->> %(event)s AS event, headers ->> %(version)s AS version
      FROM {schema}.commit_log ORDER BY log_id DESC LIMIT %(limit)s) newest
JOIN {schema}.topic USING (topic_id)
JOIN {schema}.op_log op USING (transaction_id)
WHERE op.decision = 'C'
GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
""")


@dataclass(frozen=True, slots=True)
class SeenEvent:
    """Committed messages with one topic, event, version and producer group, among the newest messages of the log.

    `event` and `version` are the texts of the headers, cut off after 200 characters, or '' without a header.
    """

    topic: str
    event: str
    version: str
    producer_group: str
    messages: int
    last_at: datetime
    last_message_id: UUID


def seen_events(run: Executor, *, newest: int) -> list[SeenEvent]:
    """Return the events of the committed messages among the `newest` last rows of the log."""
    return run.objects(SeenEvent, _SEEN, {"event": EVENT_HEADER, "version": VERSION_HEADER, "limit": newest})


class VersionState(StrEnum):
    """What the code of this process can do with a version."""

    PUBLISHED = "published"
    """A type declares the version, and no type declares a higher one of the event."""
    DECLARED = "declared"
    """A type declares the version, and another type declares a higher one."""
    CONVERTED = "converted by @upcast"
    """No type declares the version, and a function turns its bodies into another version."""
    UNKNOWN = "unknown to this code"
    """Other code has published the version."""


@dataclass(frozen=True, slots=True)
class EventVersion:
    """One version of an event. `messages` and `last_at` are about the newest messages of the log.

    `number` is 0 for messages whose header is not a whole number. `kind` is the path of the type, or ''. `fields` and
    `example` are made from the type, and `example` is JSON text, in which the fields that OUTBOX['MASKED_FIELDS'] names
    are masked.
    """

    number: int
    state: VersionState
    kind: str
    fields: Sequence[EventField]
    example: str
    messages: int
    last_at: datetime | None
    last_message_id: UUID | None


@dataclass(frozen=True, slots=True)
class EventReader:
    """A consumer group that gets the event. `handler` is '' if the handler is in the code of another service."""

    group: str
    handler: str
    reads: str


@dataclass(frozen=True, slots=True)
class Event:
    """One event; its versions, the newest first. `topics` has several names only for an event without a type here."""

    name: str
    topics: Sequence[str]
    publishers: Sequence[str]
    readers: Sequence[EventReader]
    versions: Sequence[EventVersion]

    @property
    def last(self) -> EventVersion | None:
        """The version of the newest message of the event; None if the newest messages have none of it."""
        found = [(one.last_at, one.number, one) for one in self.versions if one.last_at is not None]
        return max(found, key=lambda item: item[:2])[2] if found else None

    @property
    def has_unknown(self) -> bool:
        """Whether a newest message has a version that this code does not know."""
        return any(one.state is VersionState.UNKNOWN for one in self.versions)


def list_events(
    declared: Sequence[EventType], seen: Iterable[SeenEvent], groups: Mapping[str, Iterable[str]]
) -> list[Event]:
    """Return the declared events, and those that the newest messages name, by name.

    `groups` has the groups of each topic that the broker knows.
    """
    found = _by_name(declared, seen)
    types: dict[str, list[EventType]] = {}
    for one in declared:
        types.setdefault(one.name, []).append(one)
    made = []
    for name in sorted({*types, *found}):
        of_type, messages = types.get(name, []), found.get(name, [])
        topics = sorted({one.topic for one in of_type}) or sorted({one.topic for one in messages})
        made.append(
            Event(
                name,
                topics,
                sorted(_publishers(of_type, messages)),
                [reader for topic in topics for reader in _readers(name, of_type, topic, groups.get(topic, ()))],
                list(_versions(name, of_type, messages)),
            )
        )
    return made


def _by_name(declared: Sequence[EventType], seen: Iterable[SeenEvent]) -> dict[str, list[SeenEvent]]:
    """Return the messages of each event. A message without headers is of the only event of its topic, if there is one,
    as a handler of this event reads it."""
    names: dict[str, set[str]] = {}
    for one in declared:
        names.setdefault(one.topic, set()).add(one.name)
    found: dict[str, list[SeenEvent]] = {}
    for message in seen:
        of_topic = names.get(message.topic, set())
        name = message.event or (next(iter(of_topic)) if len(of_topic) == 1 else "")
        if name:
            found.setdefault(name, []).append(message)
    return found


def _publishers(declared: Iterable[EventType], messages: Iterable[SeenEvent]) -> set[str]:
    """Return the services that publish the event: as declared, and the producer groups of the newest messages."""
    own = get_settings().producer_group or "this service"
    return {one.publisher or own for one in declared} | {one.producer_group for one in messages if one.producer_group}


def _versions(name: str, declared: Sequence[EventType], messages: Sequence[SeenEvent]) -> Iterator[EventVersion]:
    types = {one.version: one for one in declared}
    counted: dict[int, list[SeenEvent]] = {}
    for message in messages:
        text = message.version or "1"
        is_number = text.isascii() and text.isdigit() and len(text) <= _LONGEST_VERSION
        counted.setdefault(int(text) if is_number else 0, []).append(message)
    known = set(versions_of(name))
    for number in sorted({*types, *known, *counted}, reverse=True):
        of_type, of_number = types.get(number), counted.get(number, [])
        last = max(of_number, key=lambda one: one.last_at, default=None)
        yield EventVersion(
            number=number,
            state=_state(number, types, known),
            kind="" if of_type is None else f"{of_type.kind.__module__}.{of_type.kind.__qualname__}",
            fields=[] if of_type is None else fields_of(of_type.shape.written),
            example="" if of_type is None else _example(of_type),
            messages=sum(one.messages for one in of_number),
            last_at=None if last is None else last.last_at,
            last_message_id=None if last is None else last.last_message_id,
        )


def _state(number: int, types: Mapping[int, EventType], known: Iterable[int]) -> VersionState:
    if number in types:
        return VersionState.PUBLISHED if number == max(types) else VersionState.DECLARED
    return VersionState.CONVERTED if number in known else VersionState.UNKNOWN


def _example(one: EventType) -> str:
    names = masked_names(get_settings().masked_fields, one.topic)
    return json.dumps(masked_value(example(one.shape.written), names), indent=2, ensure_ascii=False)


def _readers(name: str, declared: Sequence[EventType], topic: str, groups: Iterable[str]) -> Iterator[EventReader]:
    """Yield the groups that get the event: those with a handler in this code, then those that only the broker knows."""
    here = {one.subscription.group: one for one in subscribers() if one.subscription.topic == topic}
    for group, handler in sorted(here.items()):
        if reads := _reads(name, declared, handler):
            yield EventReader(group, handler.name, reads)
    for group in sorted({*groups} - {*here}):
        yield EventReader(group, "", "not known: its handler is in other code")


def _reads(name: str, declared: Sequence[EventType], handler: Subscriber) -> str:
    """Return what a handler gets of the event; '' if it does not expect the event."""
    if not handler.subscription.events:
        return "the stored version, as JSON"
    expected = [found for kind in handler.subscription.events if (found := find_event(kind)) is not None]
    direct = [f"version {one.version}" for one in expected if one.name == name]
    others = [
        f"{one.name} version {one.version}, by @upcast"
        for one in expected
        if one.name != name and any(leads_to((name, number), one.at) for number in versions_of(name))
    ]
    return ", ".join([*direct, *others])
