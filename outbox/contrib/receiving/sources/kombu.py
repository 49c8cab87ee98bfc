"""Receives a queue of RabbitMQ, through kombu."""

from __future__ import annotations

import contextlib
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kombu.connection import Connection
from kombu.entity import Queue
from kombu.exceptions import KombuError
from kombu.message import Message
from kombu.messaging import Consumer

from outbox.contrib.receiving.sources.source import Incoming, text_of
from outbox.errors import ServiceUnavailable
from outbox.utils.safe_text import error_line, mask_passwords

# After the first message, the source waits for further messages for this number of seconds.
_MORE_SECONDS: Final = 0.01
# py-amqp raises these errors for a message whose routing key, properties or headers it cannot decode.
_UNREADABLE: Final = (ValueError, OverflowError, RecursionError, struct.error)


class KombuSource:
    """Receives from one queue. The server sends further messages only while fewer than `prefetch` messages are
    unacknowledged.

    `declare` creates the durable queue if it is missing. Without `declare` the source waits until the queue exists.
    """

    def __init__(
        self,
        *,
        url: str,
        queue: str,
        declare: bool = True,
        prefetch: int = 500,
        timeout_seconds: float = 10.0,
        transport_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._template = Connection(
            url, connect_timeout=timeout_seconds, transport_options=dict(transport_options or {})
        )
        self._name = f"queue {queue!r} of {mask_passwords(url)}"
        self._queue = queue
        self._declare = declare
        self._prefetch = prefetch
        self._connection: Any = None
        self._close_socket: Callable[[], None] = _no_socket
        self._waiting: deque[Message] = deque()
        self._unreadable: ServiceUnavailable | None = None
        self._errors = (*self._template.connection_errors, *self._template.channel_errors, KombuError, OSError)

    def receive(self, limit: int, *, wait_seconds: float) -> Sequence[Incoming]:
        """Return messages. Raises ServiceUnavailable."""
        try:
            connection = self._open()
            while self._unreadable is None and len(self._waiting) < limit:
                try:
                    connection.drain_events(timeout=_MORE_SECONDS if self._waiting else wait_seconds)
                except TimeoutError:
                    break
                except _UNREADABLE as error:
                    # The messages before it are returned first. After that, it is the first message of the queue.
                    self._unreadable = ServiceUnavailable(
                        f"{self._name} has a message that cannot be decoded: {error_line(error)}. "
                        "Remove this message from the queue."
                    )
        except self._errors as error:
            raise self._unavailable(error) from error
        taken = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        if self._unreadable is not None and not taken:
            raise self._unreadable
        return [self._incoming(message) for message in taken]

    def acknowledge(self, messages: Sequence[Incoming]) -> None:
        """Acknowledge messages. Raises ServiceUnavailable."""
        try:
            for message in messages:
                message.handle.ack()
        except self._errors as error:
            raise self._unavailable(error) from error

    def close(self) -> None:
        """Close the connection. The next call of `receive` opens another connection."""
        self._waiting.clear()
        self._unreadable = None
        if self._connection is not None:
            # A close reads messages until the answer comes. If it cannot decode one, it leaves the socket open.
            with contextlib.suppress(*_UNREADABLE):
                self._connection.release()
            self._close_socket()
            self._connection = None

    def _open(self) -> Any:
        if self._connection is None:
            self._connection = self._template.clone()
            channel = self._connection.channel()
            self._close_socket = getattr(channel.connection, "collect", _no_socket)
            # Otherwise py-amqp decodes a body by the content encoding that the sender names.
            channel.auto_decode = False
            channel.basic_qos(0, self._prefetch, False)
            queue = Queue(self._queue, durable=True, no_declare=not self._declare)
            consumer = Consumer(
                channel,
                [queue],
                on_message=self._waiting.append,
                on_decode_error=lambda message, error: self._waiting.append(message),
                accept=None,
            )
            consumer.consume()
        return self._connection

    def _unavailable(self, error: BaseException) -> ServiceUnavailable:
        return ServiceUnavailable(f"{self._name} cannot be read: {type(error).__name__}: {error}")

    def _incoming(self, message: Message) -> Incoming:
        headers = {str(name): text_of(value) for name, value in (message.headers or {}).items()}
        body = message.body
        return Incoming(
            message_id=text_of(message.properties.get("message_id") or ""),
            sender=text_of(message.properties.get("app_id") or ""),
            body=bytes(body) if isinstance(body, (bytes, memoryview)) else str(body).encode(errors="surrogatepass"),
            where=f"message {message.delivery_tag} of {self._name}",
            content_type=message.content_type or "",
            headers=headers,
            problem="; ".join(error_line(error) for _, error, _ in message.errors if error is not None),
            handle=message,
        )


def _no_socket() -> None:
    """Only py-amqp has a socket that must be closed separately."""
