"""Stores foreign messages in a topic. A message is acknowledged at its source only after it is stored.

If the process dies after it has stored a message and before it acknowledges the message, the source delivers the
message again. The repetition has the same id, so the message is stored once. A stored message is like any other
message: subscribers handle it with the inbox, in order, with retries and dead letters.

The id is computed from the entry of `RECEIVE`, the source and the event's id, each the UUID namespace of the next. The
event's id alone is not unique in CloudEvents: two events of two sources would become one message.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from outbox.contrib.receiving.sources.source import (
    Convert,
    Incoming,
    Source,
    convert,
    identity,
    message_id_of,
)
from outbox.errors import (
    BrokerUnavailable,
    ConfigurationError,
    InvalidMessage,
    InvalidName,
    MessageTypeMismatch,
    OutboxError,
    SendFailed,
    ServiceUnavailable,
    TopicOverLimit,
)
from outbox.message import Message
from outbox.names import MAX_BODY_BYTES
from outbox.ports import Broker
from outbox.utils.backoff import Backoff
from outbox.utils.faults import point
from outbox.utils.safe_text import shown_text, storable

logger = logging.getLogger(__name__)

_WAIT_SECONDS: Final = 0.5
_AGAIN: Final = Backoff(first_seconds=0.5, longest_seconds=30.0, healthy_seconds=10.0)
_SHOWN_CHARACTERS: Final = 1000


class UnstorableMessage(OutboxError):
    """A received message cannot be stored in its topic. The receiver stops before this message."""


@dataclass
class Received:
    """The counts of a receiver: messages stored (repetitions included), and messages put into the poison topic."""

    stored: int = 0
    put_aside: int = 0


class Receiver:
    """Receives messages from one source into one topic.

    The ids of messages depend on `name`, so a name must always mean the same senders. If a message cannot be stored in
    `topic`, it goes unchanged into `poison_topic`, with the reason. Without a poison topic the receiver stops.
    """

    def __init__(
        self,
        source: Source,
        broker: Broker,
        *,
        name: str,
        topic: str,
        poison_topic: str | None = None,
        convert: Convert = convert,
        batch: int = 100,
    ) -> None:
        if poison_topic == topic:
            raise ConfigurationError(f"receiving {name!r}: poison_topic must differ from topic {topic!r}.")
        self._source = source
        self._broker = broker
        self._name = name
        self._topic = topic
        self._poison_topic = poison_topic
        self._convert = convert
        self._batch = batch

    def run(self, stop: threading.Event, *, on_round: Callable[[], None] | None = None) -> None:
        """Receive until `stop` is set. While the source or the broker is unavailable, wait and try again.

        Raises UnstorableMessage, or a usage error.

        `on_round` is called after each successful round, even if the round had no message.
        """
        failures = 0
        while not stop.is_set():
            try:
                self.run_once()
                failures = 0
                if on_round is not None:
                    on_round()
            except (ServiceUnavailable, BrokerUnavailable, SendFailed, TopicOverLimit) as error:
                # After the source is opened again, it delivers the unacknowledged messages again.
                self._source.close()
                failures += 1
                pause = _AGAIN.pause_seconds(failures)
                logger.warning(
                    "receiving %r is interrupted, trying again in %.1f s: %s", self._name, pause, shown_text(error)
                )
                stop.wait(pause)

    def run_once(self, *, wait_seconds: float = _WAIT_SECONDS) -> Received:
        """Receive, store and acknowledge a batch of messages.

        Raises UnstorableMessage, ServiceUnavailable or BrokerError.
        """
        received = self._source.receive(self._batch, wait_seconds=wait_seconds)
        done = Received()
        if not received:
            return done
        for part in _parts(received):
            whole = self._all_at_once(part)
            if whole:
                done.stored += len(part)
            for one in () if whole else part:
                if self._store(one):
                    done.stored += 1
                else:
                    done.put_aside += 1
        point("receive.after_send")
        self._source.acknowledge(received)
        return done

    def _all_at_once(self, incoming: Sequence[Incoming]) -> bool:
        """Store all messages in one call. If one of the messages is invalid, store no message and return False."""
        try:
            self._broker.send([self._converted(one) for one in incoming])
        except (InvalidMessage, InvalidName, ValueError):
            return False
        return True

    def _converted(self, one: Incoming) -> Message:
        if one.problem:
            raise InvalidMessage(f"{one.where} cannot be read: {one.problem}.")
        return self._convert(one, self._name, self._topic)

    def _store(self, one: Incoming) -> bool:
        """Store one message and return True, or put it into the poison topic and return False.

        Without a poison topic, raises UnstorableMessage.
        """
        try:
            self._broker.send([self._converted(one)])
        except MessageTypeMismatch:
            # The topic does not accept the type of the receiver's messages, so it would refuse every message.
            raise
        except (InvalidMessage, InvalidName, ValueError) as error:
            if self._poison_topic is None:
                raise UnstorableMessage(
                    f"receiving {self._name!r}: {one.where} cannot be stored in topic {self._topic!r}: "
                    f"{shown_text(error)} The message was not acknowledged. Remove the message at its source and "
                    "correct the sender, or declare a poison_topic."
                ) from error
            logger.error("receiving %r: %s is stored in the poison topic: %s", self._name, one.where, shown_text(error))
            self._broker.send([self._aside(one, self._poison_topic, error)])
            return False
        return True

    def _aside(self, one: Incoming, topic: str, error: Exception) -> Message:
        """Make the message for the poison topic. A long body is cut. A message without an id gets a new id."""
        headers = {
            "reason": _text(shown_text(error)),
            "received-from": _text(one.where),
            "received-id": _text(identity(one)[1]),
        }
        try:
            message_id = message_id_of(f"{self._name} poison", one)
        except (InvalidMessage, ValueError):
            message_id = uuid4()
        return Message(
            topic=topic,
            body=one.body[:MAX_BODY_BYTES],
            message_id=message_id,
            headers={**headers, "body-bytes": str(len(one.body))},
            content_type="application/octet-stream",
        )


def _parts(received: Sequence[Incoming]) -> Iterator[Sequence[Incoming]]:
    """Yield the messages in parts that one call stores within its deadline: with as many bytes as a message may have.

    A batch that exceeds the deadline would be received again, and exceed it again.
    """
    part: list[Incoming] = []
    size = 0
    for one in received:
        size += len(one.body)
        if part and size > MAX_BODY_BYTES:
            yield part
            part, size = [], len(one.body)
        part.append(one)
    yield part


def _text(value: str) -> str:
    return storable(value)[:_SHOWN_CHARACTERS]
