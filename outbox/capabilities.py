"""The capabilities of an engine, and the refusals of everything that it lacks.

A refusal is raised where the project declares the topic or subscription. Nothing is dropped silently. Capabilities are
what engines differ in, beyond the port's protocol. docs/engines.md compares the engines.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from outbox.errors import NotSupported
from outbox.subscription import Mode, OnError, Start, Subscription
from outbox.topic import MessageType, Topic


class Capability(enum.StrEnum):
    """A feature that some engines lack."""

    FIFO_TRANSACTIONS = "transactional messages on FIFO topics"
    DELAYED_TRANSACTIONS = "transactional messages with a delivery time"
    FIFO_DELAY = "delivery times on FIFO topics"
    PLAIN_BATCHES = "several messages outside of a transaction, all or none"
    IDEMPOTENT_SEND = "a message sent again is stored once"
    FIRST_DECISION_STANDS = "a later decision is distinguished from the first"
    UNCOUNTED_CHECKS = "answers that use up no check, parking and resuming"
    KEY_ORDER_ANYWHERE = "consumption in order of keys on topics that are not FIFO"
    START_POSITION = "a new group that starts at the latest message or at a time"
    STOP_ON_ERROR = "a queue that stops at a failing message"
    RUN_WITHOUT_INBOX = "handlers without the inbox"
    BROADCAST = "every consumer instance gets all messages"
    RECALL = "recalling messages that wait"
    FENCING = "producers with a transactional id"
    REJECT_TRANSACTIONAL = "refusing new transactional messages of all producers"
    REWIND = "consuming again from an earlier position"
    REPLAY = "delivering dead letters again"
    COUNTS = "counts that conservation is audited by"
    ATOMIC_PATH = "messages written by the application's own transaction"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's name, as errors write it, and its capabilities."""

    name: str
    capabilities: frozenset[Capability]

    def require(self, capability: Capability, what: str, instead: str) -> None:
        """Raise NotSupported if the engine lacks the capability; `instead` names the alternative."""
        if capability not in self.capabilities:
            raise NotSupported(f"{what}: the engine {self.name} has no {capability}. {instead}")

    def topic_refusals(self, topic: Topic) -> Iterator[str]:
        """Yield a refusal for each property of a topic that the engine lacks, with the alternative."""
        asked = [
            (
                {MessageType.FIFO, MessageType.TRANSACTION},
                Capability.FIFO_TRANSACTIONS,
                (
                    "Keep this topic on PostgreSQL. Or declare it without FIFO and let the handler order messages by "
                    "their content."
                ),
            ),
            (
                {MessageType.DELAY, MessageType.TRANSACTION},
                Capability.DELAYED_TRANSACTIONS,
                (
                    "Declare two topics and publish delayed messages outside of transactions. Or keep this topic on "
                    "PostgreSQL."
                ),
            ),
            ({MessageType.FIFO, MessageType.DELAY}, Capability.FIFO_DELAY, "Declare two topics."),
        ]
        for types, capability, instead in asked:
            if types <= topic.types and capability not in self.capabilities:
                yield f"topic {topic.name!r}: the engine {self.name} has no {capability}. {instead}"

    def subscription_refusals(self, wanted: Subscription, topic: Topic | None, *, inbox: bool = True) -> Iterator[str]:
        """Yield a refusal for each property of a subscription that the engine lacks, with the alternative.

        `topic` is the declared topic, or None if it is not declared.
        """
        ordered = wanted.mode is not Mode.CONCURRENT
        asked = [
            (
                wanted.broadcast,
                Capability.BROADCAST,
                "Give every instance a group of its own.",
            ),
            (
                ordered and (topic is None or not topic.is_fifo),
                Capability.KEY_ORDER_ANYWHERE,
                "Declare the topic FIFO, or consume concurrently.",
            ),
            (
                wanted.start is not Start.EARLIEST,
                Capability.START_POSITION,
                (
                    "Leave start out, and set the group's position with the server's own tool (mqadmin "
                    "resetOffsetByTime)."
                ),
            ),
            (
                OnError.STOP in wanted.on_error.values(),
                Capability.STOP_ON_ERROR,
                "Use 'retry' or 'dead_letter'.",
            ),
            (
                not inbox,
                Capability.RUN_WITHOUT_INBOX,
                (
                    "The server may deliver a message twice: leave idempotent=False out, so that the inbox removes "
                    "duplicates."
                ),
            ),
        ]
        where = f"group {wanted.group!r} on topic {wanted.topic!r}"
        for is_asked, capability, instead in asked:
            if is_asked and capability not in self.capabilities:
                yield f"{where}: the engine {self.name} has no {capability}. {instead}"


EVERYTHING = frozenset(Capability)
