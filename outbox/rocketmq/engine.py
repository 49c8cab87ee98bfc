"""RocketMQ's capabilities and its requirements for topics. Imports no client library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NoReturn

from outbox.capabilities import Capability, Engine
from outbox.errors import ConfigurationError
from outbox.rocketmq.admin import message_type
from outbox.rocketmq.names import collisions
from outbox.topic import MessageType, Topic

ENGINE: Final = Engine("RocketMQ", frozenset())
"""No capability: it has the port's protocol, retries, dead letters, filters and FIFO topics only."""

_TYPES: Final = {MessageType.NORMAL: 1, MessageType.FIFO: 2, MessageType.DELAY: 3, MessageType.TRANSACTION: 4}


def check_topics(topics: Iterable[Topic]) -> dict[str, Topic]:
    """The topics by name. Raises ConfigurationError for one that RocketMQ does not support."""
    known = {topic.name: topic for topic in topics}
    refused = [text for topic in known.values() for text in ENGINE.topic_refusals(topic)]
    if refused := [*refused, *collisions(known)]:
        raise ConfigurationError(" ".join(refused))
    return known


def topic_problems(topic: Topic, accepted: frozenset[int] | None) -> Iterator[str]:
    """The fault of a server's topic of these types; None: the server does not have the topic."""
    if accepted is None:
        yield (
            f"RocketMQ has no topic {topic.name!r}: create it with message.type={message_type(topic)} and "
            f"{topic.queue_count} queues."
        )
    elif lacking := sorted(kind for kind in topic.types if _TYPES[kind] not in accepted):
        yield (
            f"RocketMQ's topic {topic.name!r} does not take {', '.join(lacking)}: set "
            f"message.type={message_type(topic)}."
        )


def refuse_fencing() -> NoReturn:
    """Raise NotSupported."""
    ENGINE.require(Capability.FENCING, "a fenced producer", "Keep its topic on PostgreSQL.")
    raise AssertionError


def refuse_recall() -> NoReturn:
    """Raise NotSupported."""
    ENGINE.require(Capability.RECALL, "recall", "Let the handler check whether the message still counts.")
    raise AssertionError
