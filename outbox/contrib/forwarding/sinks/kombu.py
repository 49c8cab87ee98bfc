"""Sends to RabbitMQ, Redis and SQS through kombu. Messages of one key are sent one after the other.

The next message of a key is sent after the server has confirmed the message before it. RabbitMQ confirms a message when
it is on disk in a durable queue. With the flag `mandatory`, RabbitMQ returns a message that matches no queue. Redis
acknowledges a message in memory, and its `appendfsync` setting decides how much survives a crash. SQS answers after it
has stored the message.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from amqp.exceptions import MessageNacked, PreconditionFailed
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.exceptions import KombuError
from kombu.messaging import Producer

from outbox.contrib.forwarding.sinks.sink import NotAcknowledged, Outgoing, Rejected, one_by_one
from outbox.errors import ConfigurationError, ServiceUnavailable
from outbox.utils.safe_text import error_line, mask_passwords, shown_text

_PERSISTENT: Final = 2
# The limit of AMQP 0-9-1, in bytes.
_LONGEST_ROUTING_KEY: Final = 255
_CONFIRMING: Final = frozenset(("amqp", "pyamqp", "amqps"))


class KombuSink:
    """Sends to one server: to an exchange, or directly to a queue.

    With `exchange`, messages go to this exchange with the routing key. Without `exchange`, they go to the queue that
    the routing key names. `routing_key` is a template of `{topic}` and `{key}`. If `declare` is true and there is no
    exchange, the sink creates this queue, as a durable queue. The sink does not declare an exchange: the application
    that binds queues to the exchange must declare it. Only AMQP reports that no queue matches, so the sink refuses an
    exchange on other transports. `timeout_seconds` limits connecting and each wait for a confirmation.
    """

    binding = "amqp"
    batch = 100
    threads = 4

    def __init__(
        self,
        *,
        url: str,
        exchange: str = "",
        routing_key: str = "{topic}",
        declare: bool = True,
        timeout_seconds: float = 10.0,
        transport_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._url = url
        self._name = mask_passwords(url)
        self._confirms = url.partition(":")[0].partition("+")[0] in _CONFIRMING
        if exchange and not self._confirms:
            raise ConfigurationError(
                f"sink {self._name}: an exchange is for AMQP only, because other transports do not report that no "
                "queue is bound to it. Leave out exchange: messages then go into the queue that routing_key names."
            )
        try:
            routing_key.format(topic="", key="")
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigurationError(
                f"routing_key={routing_key!r} must be a template of {{topic}} and {{key}}: {error!r}."
            ) from error
        self._exchange = exchange
        self._routing_key = routing_key
        self._declare = declare and not exchange
        self._timeout_seconds = timeout_seconds
        self._options = {**({"confirm_publish": True} if self._confirms else {}), **(transport_options or {})}
        # The channels that no thread uses now. Two threads must not use one channel at the same time.
        self._idle: list[_Channel] = []
        self._lock = threading.Lock()

    def send(self, messages: Sequence[Outgoing]) -> Sequence[Exception | None]:
        """Send each message after the server has confirmed the message before it.

        Raises ServiceUnavailable if the server is down.
        """
        channel = self._take()
        try:
            return one_by_one(messages, lambda message: self._publish(channel, message))
        finally:
            with self._lock:
                self._idle.append(channel)

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()

    def _take(self) -> _Channel:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Channel(self._url, self._options, self._timeout_seconds, confirms=self._confirms)

    def _publish(self, channel: _Channel, message: Outgoing) -> Exception | None:
        routing_key = self._routing_key.format(topic=message.topic, key=message.key)
        if self._confirms and len(routing_key.encode(errors="replace")) > _LONGEST_ROUTING_KEY:
            return Rejected(
                f"message {message.message_id} cannot be sent to {self._name}: its routing key has more than "
                f"{_LONGEST_ROUTING_KEY} bytes, which AMQP does not allow. Use a shorter key, or leave {{key}} out of "
                "routing_key."
            )
        try:
            producer = channel.open()
            if self._declare:
                channel.declare(routing_key)
            producer.publish(
                message.body,
                exchange=self._exchange,
                routing_key=routing_key,
                content_type=message.content_type,
                content_encoding="binary",
                delivery_mode=_PERSISTENT,
                headers=dict(message.headers),
                message_id=str(message.message_id),
                type=message.topic,
                mandatory=self._confirms,
                retry=False,
                **({"confirm_timeout": self._timeout_seconds} if self._confirms else {}),
            )
        except MessageNacked:
            return NotAcknowledged(f"{self._name} refused the message (nack)")
        except channel.errors as error:
            # The broker may already have this message. A channel with an unfinished operation cannot be used again.
            channel.close()
            if isinstance(error, PreconditionFailed) and "message size" in shown_text(error):
                return Rejected(f"{self._name} refused message {message.message_id}: {shown_text(error)}")
            raise ServiceUnavailable(f"{self._name} is unavailable: {error_line(error)}") from error
        except Exception:
            # The library could not encode the message, and may have written a part of it to the connection.
            channel.close()
            raise
        if channel.returned:
            channel.returned.clear()
            # The error text has no message id, because outbox detects an outage by equal error texts of different
            # messages.
            return NotAcknowledged(
                f"no queue of {self._name} is bound to exchange {self._exchange!r} with routing key {routing_key!r}"
            )
        return None


class _Channel:
    """A connection with one channel.

    The first message opens the connection. The channel remembers the queues that it has declared.
    """

    def __init__(self, url: str, options: Mapping[str, Any], timeout_seconds: float, *, confirms: bool) -> None:
        self._template = Connection(url, connect_timeout=timeout_seconds, transport_options=dict(options))
        self._connection: Any = None
        self._producer: Any = None
        # Only AMQP servers return a message that matches no queue.
        self._on_return = self._returned if confirms else None
        self._declared: set[str] = set()
        self.returned: list[object] = []

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The error types that the transport raises."""
        return (*self._template.connection_errors, *self._template.channel_errors, KombuError, OSError)

    def open(self) -> Any:
        """Return the producer. If the connection is closed, open it."""
        if self._producer is None:
            self._connection = self._template.clone()
            channel = self._connection.channel()
            self._producer = Producer(channel, auto_declare=False, on_return=self._on_return)
        return self._producer

    def declare(self, name: str) -> None:
        """Declare the durable queue with this name, once per connection."""
        if name not in self._declared:
            Queue(name, exchange=Exchange(""), durable=True).bind(self._producer.channel).queue_declare()
            self._declared.add(name)

    def close(self) -> None:
        """Close the connection. The next call of `open` makes another connection."""
        if self._connection is not None:
            self._connection.release()
        self._connection = self._producer = None
        self._declared.clear()
        self.returned.clear()

    def _returned(self, *given: object) -> None:
        self.returned.append(given)
