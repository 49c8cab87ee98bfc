"""Declared topics and groups in RocketMQ: their names, their types, and the features that RocketMQ refuses.

This module imports no client library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from outbox.errors import ConfigurationError
from outbox.message import Message
from outbox.refusals import Refusal, Refusals
from outbox.subscription import Effects, Mode, OnError, Start
from outbox.topic import MessageType, Topic

_FENCING: Final = Refusal("producers with a transactional id", "Keep the topics of this producer on PostgreSQL.")
_RECALL: Final = Refusal(
    "recall of messages that it has stored",
    "recall() works only while a message waits for the relay. Let the handler check whether the message still matters.",
)

REFUSALS: Final = Refusals(
    engine="RocketMQ",
    topics=(
        (
            lambda topic: {MessageType.FIFO, MessageType.DELAY} <= topic.types,
            Refusal(
                "delivery times on FIFO topics",
                "Declare two topics, one for FIFO messages and one for delayed messages.",
            ),
        ),
        (
            lambda topic: topic.backlog_limit is not None,
            Refusal(
                "limits of a topic's backlog",
                "Remove backlog_limit, and watch the consumer lag of RocketMQ.",
            ),
        ),
        (
            lambda topic: topic.searchable,
            Refusal(
                "option for an index of keys",
                "Remove searchable: RocketMQ keeps an index of all keys (`mqadmin queryMsgByKey`).",
            ),
        ),
    ),
    subscriptions=(
        (
            lambda asked: asked.subscription.broadcast,
            Refusal("consumption in which every instance gets all messages", "Give every instance a group of its own."),
        ),
        (
            lambda asked: (
                asked.subscription.mode is not Mode.CONCURRENT and (asked.topic is None or not asked.topic.is_fifo)
            ),
            Refusal(
                "consumption in order of keys on topics that are not FIFO",
                "Declare the topic with the type FIFO, or use mode='concurrent'.",
            ),
        ),
        (
            lambda asked: asked.subscription.start is not Start.EARLIEST,
            Refusal(
                "new group that starts at the latest message or at a time",
                "Remove start=, and set the group's position with RocketMQ's own tool (mqadmin resetOffsetByTime).",
            ),
        ),
        (
            lambda asked: OnError.STOP in asked.subscription.on_error.values(),
            Refusal("queue that stops at a failing message", "Use on_error with 'retry' or 'dead_letter'."),
        ),
        (
            lambda asked: bool(asked.subscription.options),
            Refusal(
                "options of parts, such as limits for all workers together",
                "Remove options=. Instead of limits, set `threads` and the number of consumer processes.",
            ),
        ),
        (
            lambda asked: asked.subscription.effects is Effects.OUTSIDE,
            Refusal(
                "handlers whose effects are outside of the database (effects='outside')",
                "Remove effects, and let the handler publish a message for each slow call. Or keep this topic on "
                "PostgreSQL.",
            ),
        ),
        (
            lambda asked: not asked.inbox,
            Refusal(
                "handlers without the inbox",
                "Remove idempotent=False, so that the inbox removes duplicates. The server may deliver a message "
                "twice.",
            ),
        ),
    ),
    calls={
        "send": Refusal(
            "several messages outside of a transaction, all or none",
            "Publish the messages inside `transaction.atomic()`, where the ledger binds them together, or one by one.",
        ),
        "send_half": Refusal(
            "half messages with an order or a delivery time",
            "Publish with outbox.contrib.django inside atomic(), which stores the message for the relay.",
        ),
        "take_over": _FENCING,
        "leftovers": _FENCING,
        "recall": _RECALL,
        "recall_key": _RECALL,
        "run_once": Refusal(
            "report of what is due now",
            "Run outbox_worker. With the option --until-drained, the worker ends when no message is left.",
        ),
        "install": Refusal("tables in a database", "Create RocketMQ's topics and groups with outbox_install --create."),
    },
)

_TYPES: Final = {MessageType.NORMAL: 1, MessageType.FIFO: 2, MessageType.DELAY: 3, MessageType.TRANSACTION: 4}


def wire_name(name: str) -> str:
    """Return the name of a topic or group in RocketMQ, which refuses dots: `order.paid` becomes `order-paid`.

    `%` cannot replace a dot. RocketMQ's schema allows `%` in a name, but the proxy reads `%` as the end of a namespace.
    """
    return name.replace(".", "-")


def in_namespace(namespace: str, name: str) -> str:
    """Return the name of a topic or group in a namespace.

    The proxy ignores the namespace of a request, so the namespace is a part of the name.
    """
    return f"{namespace}--{name}" if namespace else name


def collisions(names: Iterable[str]) -> Iterator[str]:
    """Yield a text for each pair of names that become the same name in RocketMQ."""
    known: dict[str, str] = {}
    for name in names:
        other = known.setdefault(wire_name(name), name)
        if other != name:
            yield f"{other!r} and {name!r} are both {wire_name(name)!r} in RocketMQ: rename one of them."


def check_topics(topics: Iterable[Topic]) -> dict[str, Topic]:
    """Return the topics by name. Raises ConfigurationError for a topic that RocketMQ does not support."""
    known = {topic.name: topic for topic in topics}
    refused = [text for topic in known.values() for text in REFUSALS.of_topic(topic)]
    if refused := [*refused, *collisions(known)]:
        raise ConfigurationError(" ".join(refused))
    return known


def is_relayed(topic: Topic, message: Message) -> bool:
    """Whether a message that is bound to a local transaction takes the way over the relay.

    RocketMQ's half messages have neither a message group nor a delivery time.
    """
    return MessageType.TRANSACTION in topic.types and (topic.is_fifo or message.is_delayed)


def has_relayed(topic: Topic) -> bool:
    """Whether messages of the topic can take the way over the relay."""
    return MessageType.TRANSACTION in topic.types and not {MessageType.FIFO, MessageType.DELAY}.isdisjoint(topic.types)


def types_on_server(topic: Topic) -> frozenset[MessageType]:
    """Return the types that the topic needs in RocketMQ: without TRANSACTION if the relay sends all its messages."""
    only_delayed = MessageType.DELAY in topic.types and MessageType.NORMAL not in topic.types
    return topic.types - {MessageType.TRANSACTION} if topic.is_fifo or only_delayed else topic.types


def message_type(topic: Topic) -> str:
    """Return the message type of a topic in RocketMQ. For a topic with several types on the server, return MIXED."""
    types = types_on_server(topic)
    return next(iter(types)).upper() if len(types) == 1 else "MIXED"


def topic_problems(topic: Topic, accepted: frozenset[int] | None) -> Iterator[str]:
    """Yield what is wrong with a declared topic.

    `accepted` is the set of message types that the topic accepts on the server, or None if the server does not have the
    topic.
    """
    if accepted is None:
        yield (
            f"RocketMQ has no topic {topic.name!r}: create it with message.type={message_type(topic)} and "
            f"{topic.queue_count} queues."
        )
    elif lacking := sorted(kind for kind in types_on_server(topic) if _TYPES[kind] not in accepted):
        yield (
            f"RocketMQ's topic {topic.name!r} does not take {', '.join(lacking)}: set "
            f"message.type={message_type(topic)}."
        )
