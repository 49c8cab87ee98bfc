"""Finds unfinished messages in a broker that the project used before, and where none of its workers runs any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from django.db import connections

from outbox.broker.database.executor import Executor
from outbox.broker.operations.presence import is_used_by, unknown_transactions
from outbox.broker.operations.status import BrokerStatus, GroupStatus, TopicStatus, broker_status
from outbox.broker.schema.install import check_schema, installed_version
from outbox.contrib.django.database.aliases import broker_database, database_at, require_database
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.pruning import first_id_at
from outbox.contrib.django.settings.conf import OutboxSettings
from outbox.contrib.django.subscribers.registry import subscribers
from outbox.errors import UsageError
from outbox.ports import LeftoverWork
from outbox.rocketmq.admin import brokers_of, parse_address
from outbox.rocketmq.left import Timers
from outbox.rocketmq.left import left as left_on_rocketmq

_SAMPLE: Final = 100

# Fields of TopicTotals and GroupStatus: running workers finish the first, an operator must settle the second.
_MOVING_OF_TOPIC: Final = ("undecided", "unsequenced", "held", "scheduled")
_STUCK_OF_TOPIC: Final = ("parked",)
_MOVING_OF_GROUP: Final = ("lag", "retrying")
_STUCK_OF_GROUP: Final = ("dead",)
_WORDS: Final = {"unsequenced": "not queued yet", "lag": "not handled"}


def left_behind(alias: str, settings: OutboxSettings) -> list[str]:
    """The project's undelivered messages in a broker on `alias` other than OUTBOX['BROKER']; empty if there are none.

    Raises BrokerUnavailable, or psycopg.Error if the tables cannot be read.
    """
    groups = sorted({item.subscription.group for item in subscribers()})
    with database_at(alias, settings).connect(name="outbox-check") as connection:
        if installed_version(connection, settings.schema) == 0:
            return []
        run = Executor(connection, settings.schema)
        if not is_used_by(run, producer_group=settings.producer_group, consumer_groups=groups):
            return []
        return list(undelivered(broker_status(run)))


def unknown_to_broker(alias: str, settings: OutboxSettings) -> int:
    """How many of the oldest ledger rows on `alias` are of transactions that the broker has never seen.

    Pruning removes a row only when the broker shows it as decided. So rows for another broker stay, and are the oldest.
    Raises BrokerError, psycopg.Error, or django.db.Error.
    """
    below = first_id_at(datetime.now(UTC) - timedelta(minutes=1))
    ids = ledger.ids_between(connections[alias], UUID(int=0), below, limit=_SAMPLE)
    if not ids:
        return 0
    with broker_database(settings).connect(name="outbox-check") as connection:
        check_schema(connection, settings.schema)
        return len(unknown_transactions(Executor(connection, settings.schema), ids))


def undelivered(status: BrokerStatus) -> Iterator[str]:
    """The unfinished messages, in words."""
    for topic in status.topics:
        yield from _of_topic(topic, _MOVING_OF_TOPIC + _STUCK_OF_TOPIC)
    for group in status.groups:
        yield from _of_group(group, _MOVING_OF_GROUP + _STUCK_OF_GROUP)


def left_here(settings: OutboxSettings, brokers: Sequence[str] = (), *, timers: Timers | None = None) -> LeftoverWork:
    """The unfinished work of OUTBOX['BROKER'] for the project's topics and groups, before a move to another broker.

    `brokers`: the administration ports (HOST:PORT) of every broker of RocketMQ, if BROKER does not name them. `timers`:
    those of the looks before. Raises BrokerError or UsageError.
    """
    wanted = [(item.subscription.group, item.subscription.topic) for item in subscribers()]
    topics = {*settings.topics, *(topic for _, topic in wanted)}
    if settings.is_rocketmq:
        named = brokers_of(settings.broker)
        admins = [parse_address(text) for text in brokers] or named
        if not admins:
            raise UsageError(
                "RocketMQ's clients cannot count the remaining messages: name each broker's administration port by "
                "--rocketmq-broker HOST:10911, or in OUTBOX['BROKER'] by ?brokers=HOST:10911."
            )
        producer_group = settings.producer_group
        return left_on_rocketmq(
            admins, wanted, sorted(topics), timers or Timers(), producer_group=producer_group, settles=bool(named)
        )
    require_database(settings)
    with broker_database(settings).connect(name="outbox-left") as connection:
        status = broker_status(Executor(connection, settings.schema))
    found = LeftoverWork()
    groups = {group for group, _ in wanted}
    for topic in status.topics:
        if topic.name in topics:
            found.waiting.extend(_of_topic(topic, _MOVING_OF_TOPIC))
            found.staying.extend(_of_topic(topic, _STUCK_OF_TOPIC))
    for group in status.groups:
        if group.name in groups:
            found.waiting.extend(_of_group(group, _MOVING_OF_GROUP))
            found.staying.extend(_of_group(group, _STUCK_OF_GROUP))
    return found


def _of_topic(topic: TopicStatus, fields: Sequence[str]) -> Iterator[str]:
    for name in fields:
        if number := getattr(topic.totals, name):
            yield f"topic {topic.name!r} has {number} messages {_WORDS.get(name, name)}"


def _of_group(group: GroupStatus, fields: Sequence[str]) -> Iterator[str]:
    for name in fields:
        if (number := getattr(group, name)) and not group.broadcast:
            yield f"group {group.name!r} has {number} messages {_WORDS.get(name, name)}"
