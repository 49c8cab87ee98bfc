"""Actions on topics (create, change, delete), and the list of the declared ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import list_topics
from outbox.broker.operations.deletion import delete_topic
from outbox.contrib.django.actions.declaration import ActionPlan, Field, FieldKind, Values, action, argument, counted
from outbox.contrib.django.actions.groups import describe_losses
from outbox.contrib.django.actions.listing import Column, Listing
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.engine.broker import get_broker
from outbox.errors import UnknownTopic, UsageError
from outbox.topic import MessageType, Topic

_NAME: Final = argument("name", "topic")
_PROPERTIES: Final = (
    _NAME,
    Field("type", "type of messages; repeatable", many=True, choices=tuple(map(str, MessageType))),
    Field("queue_count", "number of queues; at most this number of consumers can share the topic", FieldKind.NUMBER),
    Field("retention_seconds", "number of seconds for which the broker keeps consumed messages", FieldKind.NUMBER),
    Field(
        "on_park",
        "FIFO topics: whether messages wait for a parked message of their key (hold) or not (release)",
        choices=("hold", "release"),
    ),
    Field(
        "backlog_limit",
        "the greatest number of messages that a group may be behind; 0 removes the limit",
        FieldKind.NUMBER,
    ),
    Field(
        "space_limit_bytes",
        "the greatest size in bytes of all messages that the broker stores; 0 removes the limit",
        FieldKind.NUMBER,
    ),
    Field(
        "on_limit",
        "whether publishing is refused, or logs a warning, while a limit is exceeded",
        choices=("refuse", "warn"),
    ),
    Field(
        "key_lock",
        "FIFO topics: whether transactions that publish the same key run one after the other",
        choices=("on", "off"),
    ),
)


@action("create_topic", "Create a topic", "outbox_topic create", *_PROPERTIES, permission=None)
def _create(values: Values) -> ActionPlan:
    name = values["name"]
    if name in _topics():
        raise UsageError(f"topic {name!r} exists already: `outbox_topic alter {name}` changes it.")
    topic = Topic(name=name, **_properties(values))
    return ActionPlan(
        subject=f"topic {name}",
        effect=f"Create topic {name}.",
        do=lambda: _declare(topic),
    )


@action(
    "alter_topic",
    "Change some properties of a topic, and keep its other properties",
    "outbox_topic alter",
    *_PROPERTIES,
    permission=None,
)
def _alter(values: Values) -> ActionPlan:
    name, known = values["name"], _topics()
    if name not in known:
        raise UnknownTopic(f"topic {name!r} is not declared; use one of: {', '.join(sorted(known)) or 'none'}.")
    changed = replace(known[name], **_properties(values))
    return ActionPlan(
        subject=f"topic {name}",
        effect=f"Change topic {name}. Properties that you do not give keep their values.",
        before=_shown(known[name]),
        nothing=changed == known[name],
        do=lambda: _declare(changed),
    )


@action(
    "delete_topic",
    "Delete a topic: refuse new messages, delete its subscriptions and messages",
    "outbox_topic delete",
    _NAME,
    permission=None,
)
def _delete(values: Values) -> ActionPlan:
    name = values["name"]
    with broker_connection() as (connection, schema):
        loss = delete_topic(Executor(connection, schema), name, dry_run=True)

    def do() -> Mapping[str, Any]:
        with broker_connection() as (connection, schema):
            return {"lost": asdict(delete_topic(Executor(connection, schema), name))}

    return ActionPlan(
        subject=f"topic {name}",
        effect=f"Delete topic {name}, with {counted(loss.undelivered, 'message')} in no queue yet, and "
        f"{describe_losses(loss.groups)}. Remove the topic from OUTBOX['TOPICS'], or `migrate` declares it again.",
        caution="This cannot be undone.",
        dangerous=True,
        before={"losses": asdict(loss)},
        do=do,
    )


def _topics() -> dict[str, Topic]:
    with broker_connection() as (connection, schema):
        return {topic.name: topic for topic in list_topics(Executor(connection, schema))}


def _properties(values: Values) -> dict[str, Any]:
    given = {
        name: values[name]
        for name in ("queue_count", "retention_seconds", "on_park", "backlog_limit", "space_limit_bytes", "on_limit")
    }
    properties: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name in ("backlog_limit", "space_limit_bytes"):
        if values[name] is not None:
            properties[name] = values[name] or None
    if values["type"]:
        properties["types"] = frozenset(map(MessageType, values["type"]))
    if values["key_lock"]:
        properties["key_lock"] = values["key_lock"] == "on"
    return properties


def _declare(topic: Topic) -> Mapping[str, Any]:
    get_broker().declare([topic])
    return _shown(topic)


def _shown(topic: Topic) -> dict[str, Any]:
    return {**asdict(topic), "types": sorted(topic.types)}


LISTED: Final = Listing(
    "declared_topics",
    (
        Column("topic", "name"),
        Column("types", lambda one: "+".join(sorted(one.types))),
        Column("queues", "queue_count"),
        Column("retention s", "retention_seconds"),
        Column("key lock", "key_lock"),
        Column("on park", "on_park"),
    ),
    lambda run, asked: list_topics(run),
    command="outbox_topic list",
    help="list every topic of the broker",
    json=_shown,
)
