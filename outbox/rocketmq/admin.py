"""Creates RocketMQ's topics and consumer groups over the administration port, which gRPC clients cannot.

It speaks RocketMQ's remoting protocol in JSON: a frame of two lengths, a header and a body. An operator may use
`mqadmin` instead; this module serves tests, the demonstration and `manage.py outbox_install`.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from outbox.errors import BrokerError, BrokerUnavailable, ConfigurationError, UsageError
from outbox.rocketmq.names import wire_name
from outbox.subscription import Mode, Subscription
from outbox.topic import MessageType, Topic

_UPDATE_TOPIC: Final = 17
_QUERY_OFFSET: Final = 14
_UPDATE_OFFSET: Final = 15
_UPDATE_GROUP: Final = 200
_CLUSTERS: Final = 106
_SUCCESS: Final = 0
_NOT_SUPPORTED: Final = 3
_NOT_FOUND: Final = 22
_READ_AND_WRITE: Final = 6
_NO_LIMIT: Final = 1_000_000
# RocketMQ refuses longer frames itself (com.rocketmq.remoting.frameMaxLength).
_LARGEST_FRAME: Final = 16 * 1024 * 1024


def message_type(topic: Topic) -> str:
    """The one message type of a topic in RocketMQ; MIXED if the declared topic has several types."""
    return next(iter(topic.types)).upper() if len(topic.types) == 1 else "MIXED"


def parse_address(text: str) -> Admin:
    """The administration port in a text HOST:PORT. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"{text!r} must be the HOST:PORT of a broker's administration port (listenPort, 10911).")
    return Admin(host, int(port))


def brokers_of(url: str) -> list[Admin]:
    """The administration ports in the address of RocketMQ, `rocketmq://HOST:8081?brokers=HOST:10911,HOST:10911`.

    Empty if the address has none. Raises ConfigurationError.
    """
    given = parse_qs(urlsplit(url).query, keep_blank_values=True)
    if unknown := sorted(set(given) - {"brokers"}):
        raise ConfigurationError(
            f"the address of RocketMQ has an unknown option {', '.join(map(repr, unknown))}: the form is "
            "rocketmq://HOST:8081?brokers=HOST:10911,HOST:10911."
        )
    try:
        return [parse_address(text) for value in given.get("brokers", ()) for text in value.split(",")]
    except UsageError as error:
        raise ConfigurationError(f"the address of RocketMQ, ?brokers=: {error}") from error


@dataclass(frozen=True)
class Admin:
    """The administration port of one broker (listenPort, 10911 by default). Every call raises BrokerError."""

    host: str
    port: int
    timeout_seconds: float = 10.0

    def create_topic(self, topic: Topic) -> None:
        """Create the topic, or update it."""
        self._ask(
            (self.host, self.port),
            _UPDATE_TOPIC,
            {
                "topic": wire_name(topic.name),
                "defaultTopic": "TBW102",
                "readQueueNums": topic.queue_count,
                "writeQueueNums": topic.queue_count,
                "perm": _READ_AND_WRITE,
                "topicFilterType": "SINGLE_TAG",
                "order": topic.types == {MessageType.FIFO},
                "attributes": f"+message.type={message_type(topic)}",
            },
        )

    def create_group(self, subscription: Subscription, topic: Topic) -> None:
        """Create the subscription's group, or update it, and start it at the oldest message.

        Without a stored offset RocketMQ starts near the newest message. An ordered mode is an orderly group in
        RocketMQ. The server's own limit of attempts is set out of reach, because the subscription's limit counts.
        """
        group = wire_name(subscription.group)
        body = {
            "groupName": group,
            "consumeEnable": True,
            "consumeFromMinEnable": True,
            "consumeMessageOrderly": subscription.mode is not Mode.CONCURRENT,
            "retryMaxTimes": _NO_LIMIT,
        }
        self._ask((self.host, self.port), _UPDATE_GROUP, {}, json.dumps(body).encode())
        for number in range(topic.queue_count):
            queue = {"consumerGroup": group, "topic": wire_name(subscription.topic), "queueId": number}
            if self._offset(queue) == 0:
                self._ask((self.host, self.port), _UPDATE_OFFSET, {**queue, "commitOffset": 0})

    def stored_offset(self, group: str, topic: str, queue: int = 0) -> int:
        """The offset that a group has stored for a queue, by their names in RocketMQ; 0 if there is none."""
        return self._offset({"consumerGroup": group, "topic": topic, "queueId": queue})

    def store_offset(self, group: str, topic: str, offset: int, queue: int = 0) -> None:
        """Store the offset; a missing group is created."""
        fields = {"consumerGroup": group, "topic": topic, "queueId": queue, "commitOffset": offset}
        self._ask((self.host, self.port), _UPDATE_GROUP, {}, json.dumps({"groupName": group}).encode())
        self._ask((self.host, self.port), _UPDATE_OFFSET, fields)

    def _offset(self, queue: Mapping[str, Any]) -> int:
        """The offset that the group has stored for a queue; 0 if there is none."""
        code, answer, _ = self._exchange((self.host, self.port), _QUERY_OFFSET, queue, b"")
        return 0 if code == _NOT_FOUND else int(answer.get("extFields", {}).get("offset", 0))

    def is_registered(self, name_server: tuple[str, int], cluster: str) -> bool:
        """Whether the name server knows a broker of the cluster."""
        # Search the text: RocketMQ writes the numbers of brokers as keys without quotes, which is not JSON.
        return f'"clusterAddrTable":{{"{cluster}":["'.encode() in self._ask(name_server, _CLUSTERS, {})

    def ask(self, code: int, fields: Mapping[str, Any]) -> tuple[int, Mapping[str, Any], bytes]:
        """The broker's answer to a request: its code (0 is success), its header and its body."""
        return self._exchange((self.host, self.port), code, fields, b"")

    def _ask(self, address: tuple[str, int], code: int, fields: Mapping[str, Any], body: bytes = b"") -> bytes:
        status, answer, rest = self._exchange(address, code, fields, body)
        if status != _SUCCESS:
            why = answer.get("remark") or f"code {status}"
            raise BrokerError(f"RocketMQ at {address[0]}:{address[1]} refused request {code}: {why}.")
        return rest

    def _exchange(
        self, address: tuple[str, int], code: int, fields: Mapping[str, Any], body: bytes
    ) -> tuple[int, Mapping[str, Any], bytes]:
        header = {
            "code": code,
            "language": "PYTHON",
            "version": 0,
            "opaque": 1,
            "flag": 0,
            "extFields": {name: _text(value) for name, value in fields.items()},
            "serializeTypeCurrentRPC": "JSON",
        }
        encoded = json.dumps(header).encode()
        frame = struct.pack(">II", 4 + len(encoded) + len(body), len(encoded)) + encoded + body
        where = f"{address[0]}:{address[1]}"
        try:
            with socket.create_connection(address, self.timeout_seconds) as connection:
                connection.sendall(frame)
                status, answer, rest = _answer(connection)
        except OSError as error:
            raise BrokerUnavailable(f"RocketMQ at {where} cannot be administered: {error}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise _no_broker(where) from error
        if status == _NOT_SUPPORTED:
            # A name server speaks the same protocol, but does not know the requests of a broker.
            raise _no_broker(where)
        return status, answer, rest


def _answer(connection: socket.socket) -> tuple[int, Mapping[str, Any], bytes]:
    """Read one frame. Raises OSError; or ValueError, KeyError or TypeError if it is not a frame of RocketMQ."""
    total, length = struct.unpack(">II", _exactly(connection, 8))
    # The highest byte is the encoding of the header.
    length &= 0xFFFFFF
    if not 4 + length <= total <= _LARGEST_FRAME:
        raise ValueError(f"a frame of {total} bytes with a header of {length}")
    answer = json.loads(_exactly(connection, length))
    return int(answer["code"]), answer, _exactly(connection, total - 4 - length)


def _no_broker(where: str) -> BrokerUnavailable:
    return BrokerUnavailable(
        f"{where} does not answer like a RocketMQ broker: give its administration port (listenPort, 10911), not the "
        "proxy's (8081) or the name server's."
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("the connection was closed")
        parts += part
    return bytes(parts)
