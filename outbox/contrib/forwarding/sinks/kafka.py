"""Sends to Kafka through an idempotent producer. Messages of one key are sent one after the other.

The next message of a key is sent after all in-sync replicas have acknowledged the message before it. The producer
prevents duplicates only while this process runs. After a crash of the process, a new producer may write a message
again. A reader that must process a message only once must compare the ids in the header `message-id`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox.contrib.forwarding.sinks.sink import NotAcknowledged, Outgoing, Rejected
from outbox.errors import ConfigurationError, ServiceUnavailable

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.05
_REJECTED: Final = frozenset((KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG, KafkaError.INVALID_RECORD))
# The sink sets these options itself. With other values of these options, a message could overtake an unacknowledged
# message of its key.
_FIXED: Final = {"enable.idempotence": True, "acks": "all"}


class KafkaSink:
    """Sends to a cluster.

    `servers` is a list of host:port, separated by commas. `config` has further options of librdkafka.

    Each message goes to the Kafka topic that it names. The key chooses the partition as in Java (murmur2). The topics
    must exist, or the cluster must create them. `timeout_seconds` is the time limit for an acknowledgement.
    """

    binding = "kafka"
    batch = 500
    threads = 2

    def __init__(self, *, servers: str, timeout_seconds: float = 30.0, config: Mapping[str, Any] | None = None) -> None:
        given = dict(config or {})
        if fixed := sorted(set(_FIXED) & set(given)):
            raise ConfigurationError(
                f"kafka {servers}: config must not set {', '.join(fixed)}, because the order per key depends on "
                "these options. Remove them from config."
            )
        self._servers = servers
        self._config = {
            "partitioner": "murmur2_random",
            "linger.ms": 1,
            **given,
            **_FIXED,
            "bootstrap.servers": servers,
            "message.timeout.ms": int(timeout_seconds * 1000),
            "logger": logger,
        }
        self._lock = threading.Lock()
        self._producer: Producer | None = self._made()

    def send(self, messages: Sequence[Outgoing]) -> Sequence[Exception | None]:
        """Send messages. If Kafka acknowledges no message in time, or the producer fails, raises ServiceUnavailable."""
        producer = self._current()
        # An exception is about a message that the library could not encode, so it was not sent.
        outcomes: dict[int, KafkaError | Exception | None] = {}
        for place, message in enumerate(messages):
            try:
                self._produce(producer, place, message, outcomes)
            except (ValueError, TypeError, OverflowError) as error:
                outcomes[place] = error
        while len(outcomes) < len(messages):
            self._poll(producer)
        errors = [error for error in outcomes.values() if isinstance(error, KafkaError)]
        # After a fatal error, `produce` raises this code, although `fatal()` of the error is false.
        if any(error.code() == KafkaError._FATAL for error in errors):
            self._drop(producer)
        if len(errors) == len(messages) and all(error.code() == KafkaError._MSG_TIMED_OUT for error in errors):
            raise ServiceUnavailable(f"kafka {self._servers} acknowledged no message")
        return [self._result(messages[place], outcomes[place]) for place in range(len(messages))]

    def close(self) -> None:
        """Close the connections. A message that is not acknowledged yet counts as not sent."""
        with self._lock:
            producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            with contextlib.suppress(KafkaException):
                producer.flush(5)

    def _produce(
        self, producer: Producer, place: int, message: Outgoing, outcomes: dict[int, KafkaError | Exception | None]
    ) -> None:
        headers = {"message-id": str(message.message_id), "content-type": message.content_type, **message.headers}
        while True:
            try:
                producer.produce(
                    message.topic,
                    message.body,
                    message.key.encode() or None,
                    headers=[(name, value.encode()) for name, value in headers.items()],
                    on_delivery=partial(_note, outcomes, place),
                )
                return
            except BufferError:
                self._poll(producer)
            except KafkaException as error:
                outcomes[place] = error.args[0]
                return

    def _poll(self, producer: Producer) -> None:
        """Wait for acknowledgements. If the producer has failed, raises ServiceUnavailable."""
        try:
            producer.poll(_POLL_SECONDS)
        except KafkaException as error:
            self._drop(producer)
            raise ServiceUnavailable(f"kafka {self._servers}: the producer failed: {error.args[0].str()}") from error

    def _result(self, message: Outgoing, error: KafkaError | Exception | None) -> Exception | None:
        if error is None:
            return None
        if not isinstance(error, KafkaError):
            kind = type(error).__name__
            return Rejected(f"message {message.message_id} cannot be written for kafka: {kind}: {error}")
        said = (
            f"kafka {self._servers} did not accept a message for topic {message.topic!r}: {error.name()}: {error.str()}"
        )
        if error.code() in _REJECTED:
            return Rejected(f"{said} (message {message.message_id})")
        # The error text has no message id, because outbox detects an outage by equal error texts of different messages.
        return NotAcknowledged(said)

    def _current(self) -> Producer:
        with self._lock:
            if self._producer is None:
                self._producer = self._made()
            return self._producer

    def _drop(self, producer: Producer) -> None:
        """Remove a producer after a fatal error, because this producer cannot send any more."""
        with self._lock:
            if self._producer is producer:
                self._producer = None

    def _made(self) -> Producer:
        try:
            return Producer(self._config)
        except KafkaException as error:
            raise ConfigurationError(f"kafka {self._servers}: config is refused: {error.args[0].str()}.") from error


def _note(outcomes: dict[int, KafkaError | Exception | None], place: int, error: KafkaError | None, _: object) -> None:
    outcomes[place] = error
