"""Refusals at start-up for declarations that the engine behind OUTBOX['BROKER'] does not support."""

from __future__ import annotations

from collections.abc import Iterator

from django.core.checks import CheckMessage, Error, Warning

from outbox.capabilities import Engine
from outbox.contrib.django.settings.conf import OutboxSettings, PathChoice
from outbox.contrib.django.subscribers.registry import subscribers
from outbox.errors import ConfigurationError
from outbox.rocketmq.admin import brokers_of
from outbox.rocketmq.names import collisions


def engine_problems(settings: OutboxSettings) -> Iterator[CheckMessage]:
    """All refusals of the engine, for `manage.py check`. The bundled broker has none."""
    if not settings.is_rocketmq:
        return
    try:
        refused = list(_refusals(_engine(settings), settings))
        names_brokers = bool(brokers_of(settings.broker))
    except ConfigurationError as error:
        refused, names_brokers = [str(error)], True
    for text in refused:
        yield Error(text, id="outbox.E031")
    if not names_brokers:
        yield Warning(
            "OUTBOX['BROKER'] names no broker of RocketMQ, only its proxy: the transactions that RocketMQ gave up "
            "cannot be read, so a committed message may stay undelivered.",
            hint="Append the administration port (listenPort, 10911) of every broker: "
            "'rocketmq://PROXY:8081?brokers=BROKER:10911,BROKER:10911'.",
            id="outbox.W033",
        )


def require_engine(settings: OutboxSettings) -> None:
    """Raise ConfigurationError for the first refusal."""
    if settings.is_rocketmq:
        for text in _refusals(_engine(settings), settings):
            raise ConfigurationError(text)


def _engine(settings: OutboxSettings) -> Engine:
    from outbox.rocketmq.client import configuration
    from outbox.rocketmq.engine import ENGINE

    configuration(settings.broker)
    return ENGINE


def _refusals(engine: Engine, settings: OutboxSettings) -> Iterator[str]:
    if settings.path is PathChoice.ATOMIC:
        yield "OUTBOX['PATH'] is 'atomic', but RocketMQ is not in a database: leave PATH out."
    if not settings.producer_group:
        yield "OUTBOX['PRODUCER_GROUP'] is not set: RocketMQ asks it for the outcome of its transactions. Name it."
    if settings.auto_create_topics:
        yield "OUTBOX['AUTO_CREATE_TOPICS'] is on: RocketMQ's clients create no topics. Declare them in TOPICS."
    for declared in settings.topics.values():
        yield from engine.topic_refusals(declared.topic)
    for item in subscribers():
        declared_topic = settings.topics.get(item.subscription.topic)
        topic = None if declared_topic is None else declared_topic.topic
        yield from engine.subscription_refusals(item.subscription, topic, inbox=item.idempotent)
    if settings.forward:
        yield (
            f"OUTBOX['FORWARD'] declares {', '.join(map(repr, settings.forward))}: outbox_worker --role forward reads "
            f"the bundled broker only, because RocketMQ holds back a whole queue and not one key. Keep the topics on "
            f"PostgreSQL, run outbox_worker --role forward with a BROKER that names its alias and declare FORWARD "
            f"there only; or let a @subscriber send them."
        )
    if settings.receive:
        yield (
            f"OUTBOX['RECEIVE'] declares {', '.join(map(repr, settings.receive))}: outbox_worker --role receive stores "
            f"in the bundled broker only, because RocketMQ stores a repetition a second time. Keep the topics on "
            "PostgreSQL, run outbox_worker --role receive with a BROKER that names its alias and declare RECEIVE there "
            "only; or let the sender publish to RocketMQ."
        )
    yield from collisions(settings.topics)
    yield from collisions({item.subscription.group for item in subscribers()})
    yield from _mixed_groups()


def _mixed_groups() -> Iterator[str]:
    """The refusals for groups: a RocketMQ group as a whole is orderly or not, and has one limit of attempts."""
    kinds: dict[str, set[bool]] = {}
    for item in subscribers():
        kinds.setdefault(item.subscription.group, set()).add(item.subscription.mode == "concurrent")
    for group, concurrent in kinds.items():
        if len(concurrent) > 1:
            yield (
                f"group {group!r} consumes one topic in order and another concurrently, which RocketMQ does not "
                "support in one group: give each topic a group of its own."
            )
