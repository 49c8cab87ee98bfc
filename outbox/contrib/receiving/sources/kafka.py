"""Receives a topic of Kafka. Offsets are committed only after the messages are stored."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from outbox.contrib.receiving.sources.source import Incoming, text_of
from outbox.errors import ConfigurationError, ServiceUnavailable

logger = logging.getLogger(__name__)

# The source sets these options itself. With other values of these options, Kafka could count messages as read before
# they are stored.
_FIXED: Final = {"enable.auto.commit": False, "enable.auto.offset.store": False}
_ID_HEADERS: Final = ("message-id", "outbox-message-id", "ce-id")
_MORE_SECONDS: Final = 0.02


class KafkaSource:
    """Receives one topic as a member of a consumer group. A new group starts at the beginning of the topic.

    The id of a message comes from its headers (`message-id`, `ce_id`). A message without such a header gets an id that
    is made from partition, offset and time. The id of a CloudEvent is made from its attributes `source` and `id`.
    """

    def __init__(self, *, servers: str, topic: str, group: str, config: Mapping[str, Any] | None = None) -> None:
        given = dict(config or {})
        if fixed := sorted(set(_FIXED) & set(given)):
            raise ConfigurationError(
                f"kafka {servers}: config must not set {', '.join(fixed)}, because offsets are committed only after "
                "the messages are stored. Remove these options from config."
            )
        self._topic = topic
        self._name = f"topic {topic!r} of kafka {servers}"
        self._config = {
            "auto.offset.reset": "earliest",
            **given,
            **_FIXED,
            "bootstrap.servers": servers,
            "group.id": group,
            "logger": logger,
        }
        self._consumer: Consumer | None = None

    def receive(self, limit: int, *, wait_seconds: float) -> Sequence[Incoming]:
        """Return messages. Raises ServiceUnavailable."""
        try:
            consumer = self._open()
            first = consumer.consume(1, wait_seconds)
            found = [*first, *(consumer.consume(limit - 1, _MORE_SECONDS) if first and limit > 1 else ())]
        except KafkaException as error:
            raise self._unavailable(error.args[0]) from error
        for message in found:
            if (problem := message.error()) is not None:
                raise self._unavailable(problem)
        return [self._incoming(message) for message in found]

    def acknowledge(self, messages: Sequence[Incoming]) -> None:
        """Commit the offsets.

        If Kafka is unavailable, or another consumer has the partition now, raises ServiceUnavailable.
        """
        ends: dict[int, int] = {}
        for message in messages:
            partition, offset = message.handle
            ends[partition] = max(ends.get(partition, 0), offset + 1)
        places = [TopicPartition(self._topic, partition, offset) for partition, offset in ends.items()]
        try:
            for place in self._open().commit(offsets=places, asynchronous=False) or ():
                if place.error is not None:
                    raise self._unavailable(place.error)
        except KafkaException as error:
            raise self._unavailable(error.args[0]) from error

    def close(self) -> None:
        """Leave the group. The next call of `receive` joins the group again."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _open(self) -> Consumer:
        if self._consumer is None:
            try:
                self._consumer = Consumer(self._config)
            except KafkaException as error:
                raise ConfigurationError(f"{self._name}: config is refused: {error.args[0].str()}.") from error
            self._consumer.subscribe([self._topic])
        return self._consumer

    def _unavailable(self, error: KafkaError) -> ServiceUnavailable:
        return ServiceUnavailable(f"{self._name} cannot be read: {error.name()}: {error.str()}")

    def _incoming(self, message: Message) -> Incoming:
        partition, offset = message.partition(), message.offset()
        headers = {_name(name): text_of(value or "") for name, value in dict(message.headers() or ()).items()}
        place = f"{self._topic}/{partition}/{offset}/{message.timestamp()[1]}"
        key = message.key()
        return Incoming(
            message_id=next((headers[name] for name in _ID_HEADERS if headers.get(name)), place),
            body=message.value() or b"",
            where=f"message {partition}/{offset} of {self._name}",
            content_type=headers.get("content-type", ""),
            key="" if key is None else text_of(key),
            headers=headers,
            handle=(partition, offset),
        )


def _name(header: str) -> str:
    """Return a header name in the form of other transports: `ce-id` for `ce_id`, which Kafka's CloudEvents use."""
    return f"ce-{header[3:]}" if header.startswith("ce_") else header
