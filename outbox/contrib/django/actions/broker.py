"""Actions on the broker: its topics, its tables, and its stored state of comparisons and receivers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import list_topics
from outbox.broker.operations.broker_conditions import SETTLED_BY_OPERATORS, incidents_to_settle, settle_incidents
from outbox.broker.operations.deletion import delete_topic
from outbox.broker.schema.install import DEFAULT_PATIENCE_SECONDS
from outbox.contrib.django.actions.declaration import (
    ActionField,
    ActionPlan,
    DeclaredAction,
    FieldKind,
    Values,
    counted,
)
from outbox.contrib.django.actions.groups import describe_losses
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.operations.comparing import losses, settle_losses
from outbox.contrib.django.operations.installation import partition_inboxes, planned_partitions, remove_broker
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.worker.receiving import forget_receivers
from outbox.errors import UnknownTopic, UsageError
from outbox.topic import MessageType, Topic

# -- topics ---------------------------------------------------------------------------------------------


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


# -- tables, comparisons, receivers ---------------------------------------------------------------------


def _drop(values: Values) -> ActionPlan:
    settings = get_settings()
    given = {"force": values["force"], "patience_seconds": values["patience"]}
    left = remove_broker(settings, **given, dry_run=True)

    def do() -> Mapping[str, Any]:
        return {"lost": remove_broker(settings, **given, dry_run=False)}

    return ActionPlan(
        subject=f"schema {settings.schema!r} on {settings.broker!r}",
        effect=f"Drop the broker's schema {settings.schema!r} on {settings.broker!r} with all messages. To keep "
        "`migrate` from creating the schema again, remove outbox from INSTALLED_APPS, or set OUTBOX['BROKER'] to "
        "another alias.",
        caution="This cannot be undone.",
        before={"lost": left},
        do=do,
    )


# The conversion reads the former table twice. The estimate assumes that PostgreSQL reads so many bytes in a second.
_READ_BYTES_PER_SECOND: Final = 300e6


def _partition(values: Values) -> ActionPlan:
    found = {alias: one for alias, one in planned_partitions().items() if not one.is_partitioned}
    seconds = 2 * sum(one.bytes for one in found.values()) / _READ_BYTES_PER_SECOND
    return ActionPlan(
        subject=f"inboxes on {', '.join(found) or 'no database'}",
        effect=f"Put the inbox into partitions on: {', '.join(found) or 'no database'}.",
        caution=f"Handlers wait while PostgreSQL reads the rows: about {seconds:.0f} s. Publishing does not wait. No "
        "command takes the partitions away again.",
        before={alias: f"about {one.rows:,} rows, {one.bytes / 1e6:,.0f} MB" for alias, one in found.items()},
        nothing=not found,
        do=lambda: {"changed": partition_inboxes(patience_seconds=values["patience"])},
    )


def _settle(values: Values) -> ActionPlan:
    if values["condition"]:
        return _settle_conditions(list(dict.fromkeys(values["condition"])))
    left = losses()
    missing = sum(one.missing for one in left)
    return ActionPlan(
        subject="comparisons of ledgers and inboxes with the broker",
        effect=f"Mark {missing} missing rows as settled, so that the conditions no longer name them.",
        caution="This cannot be undone.",
        dangerous=True,
        before={"missing": {f"{one.kind.value} {one.subject}": one.missing for one in left}},
        nothing=not left,
        do=lambda: {"settled": settle_losses()},
    )


def _settle_conditions(names: Sequence[str]) -> ActionPlan:
    with broker_connection() as (connection, schema):
        held = incidents_to_settle(Executor(connection, schema))

    def do() -> Mapping[str, Any]:
        with broker_connection() as (connection, schema):
            return {"settled": settle_incidents(Executor(connection, schema), names)}

    return ActionPlan(
        subject=f"conditions {', '.join(names)}",
        effect=f"End {', '.join(names)}: the incidents of now stay on the page Incidents, and no condition names them. "
        "A new incident raises the condition again.",
        before={name: held.get(name, 0) for name in names},
        nothing=not any(name in held for name in names),
        do=do,
    )


def _forget(values: Values) -> ActionPlan:
    names = values["forget"]
    return ActionPlan(
        subject=f"receivers {', '.join(names)}",
        effect=f"Delete the state of the receivers {', '.join(names)}. After that, no condition names these receivers.",
        do=lambda: {"forgotten": forget_receivers(names)},
    )


_NAME = ActionField(name="name", required=True, positional=True, help="topic")
_PROPERTIES = (
    _NAME,
    ActionField(name="type", many=True, choices=tuple(map(str, MessageType)), help="type of messages; repeatable"),
    ActionField(
        name="queue_count",
        kind=FieldKind.NUMBER,
        help="number of queues; at most this number of consumers can share the topic",
    ),
    ActionField(
        name="retention_seconds",
        kind=FieldKind.NUMBER,
        help="number of seconds for which the broker keeps consumed messages",
    ),
    ActionField(
        name="on_park",
        choices=("hold", "release"),
        help="FIFO topics: whether messages wait for a parked message of their key (hold) or not (release)",
    ),
    ActionField(
        name="backlog_limit",
        kind=FieldKind.NUMBER,
        help="the greatest number of messages that a group may be behind; 0 removes the limit",
    ),
    ActionField(
        name="space_limit_bytes",
        kind=FieldKind.NUMBER,
        help="the greatest size in bytes of all messages that the broker stores; 0 removes the limit",
    ),
    ActionField(
        name="on_limit",
        choices=("refuse", "warn"),
        help="whether publishing is refused, or logs a warning, while a limit is exceeded",
    ),
    ActionField(
        name="key_lock",
        choices=("on", "off"),
        help="FIFO topics: whether transactions that publish the same key run one after the other",
    ),
)

TOPICS: Final = (
    DeclaredAction(
        name="create_topic",
        title="Create a topic",
        command="outbox_topic create",
        fields=_PROPERTIES,
        plan=_create,
        permission=None,
    ),
    DeclaredAction(
        name="alter_topic",
        title="Change some properties of a topic, and keep its other properties",
        command="outbox_topic alter",
        fields=_PROPERTIES,
        plan=_alter,
        permission=None,
    ),
    DeclaredAction(
        name="delete_topic",
        title="Delete a topic: refuse new messages, delete its subscriptions and messages",
        command="outbox_topic delete",
        fields=(_NAME,),
        plan=_delete,
        permission=None,
    ),
)
DROP: Final = DeclaredAction(
    name="drop_broker",
    title="Remove the broker's tables with all messages",
    command="outbox_install --drop",
    fields=(
        ActionField(
            name="force", kind=FieldKind.FLAG, help="with --drop: also drop messages that are not delivered yet"
        ),
        ActionField(
            name="patience",
            kind=FieldKind.SECONDS,
            default=DEFAULT_PATIENCE_SECONDS,
            help="for how many seconds the command tries to lock tables that are in use (default: %(default).0f)",
        ),
    ),
    plan=_drop,
    permission=None,
)
# The command declares its option --patience together with DROP.
PARTITION: Final = DeclaredAction(
    name="partition_inbox",
    title="Put the inboxes of the application's databases into partitions",
    command="outbox_install --partition-inbox",
    fields=(DROP.fields[1],),
    plan=_partition,
    permission=None,
)
SETTLE: Final = DeclaredAction(
    name="settle",
    title="Mark the rows that comparisons report as missing, or the incidents of a condition, as settled, so that no "
    "condition names them",
    command="outbox_audit settle",
    fields=(
        ActionField(
            name="condition",
            many=True,
            choices=tuple(SETTLED_BY_OPERATORS),
            help="settle the incidents of this condition instead of missing rows (repeatable)",
        ),
    ),
    plan=_settle,
    permission=None,
)
FORGET: Final = DeclaredAction(
    name="forget",
    title="Delete the state of receivers that are not in OUTBOX['RECEIVE'] any more",
    command="outbox_worker --forget",
    fields=(
        ActionField(name="forget", many=True, help="a receiver that is not in OUTBOX['RECEIVE'] any more (repeatable)"),
    ),
    plan=_forget,
    permission=None,
)
ACTIONS: Final = (*TOPICS, DROP, PARTITION, SETTLE, FORGET)
