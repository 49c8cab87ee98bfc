"""The administration port of a broker: it creates topics and groups, and reads stored messages.

A gRPC client cannot create topics or groups, and cannot read stored messages. The port uses RocketMQ's remoting
protocol in JSON. A frame consists of the length of the frame, the length of the header, the header, and the body.
Instead of this module, an operator may use `mqadmin` for topics and groups. The proxy refuses system topics ("40002,
cannot access system topic"). So this module reads system topics through the administration port: one queue of one
broker per call.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import socket
import ssl
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from outbox.errors import BrokerError, BrokerUnavailable, UsageError
from outbox.rocketmq.address import HostPort, parse
from outbox.rocketmq.declarations import in_namespace, message_type, wire_name
from outbox.subscription import Mode, Subscription
from outbox.topic import MessageType, Topic

_UPDATE_TOPIC: Final = 17
_QUERY_OFFSET: Final = 14
_UPDATE_OFFSET: Final = 15
_UPDATE_GROUP: Final = 200
_BROKER_CONFIG: Final = 26
_SUCCESS: Final = 0
_NOT_SUPPORTED: Final = 3
_NOT_FOUND: Final = 22
_READ_AND_WRITE: Final = 6
_NO_LIMIT: Final = 1_000_000
# The largest frame in bytes. RocketMQ itself refuses longer frames (com.rocketmq.remoting.frameMaxLength).
_LARGEST_FRAME: Final = 16 * 1024 * 1024
_PULL: Final = 11
_MAX_OFFSET: Final = 30
_FOUND: Final = 0
_TOPIC_NOT_FOUND: Final = 17
# The answer has one of these codes if the queue has no message at the offset. With code 19, the offset is the end of
# the queue. With codes 20 and 21, the answer contains another offset.
_NOTHING: Final = 19
_ELSEWHERE: Final = frozenset((20, 21))
_WITH_SUBSCRIPTION: Final = 4
_AT_ONCE: Final = 32

# The system topic with the half messages of all services, and the group whose offsets say what is decided.
HALVES: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
CHECKER: Final = "CID_RMQ_SYS_TRANS"
# RocketMQ writes a map whose keys are objects (queues). Such a map is not JSON.
_QUEUES: Final = re.compile(rb"(\{[^{}]*\}):(\{[^{}]*\})")

_MAGIC_OF_SHORT_TOPIC: Final = 0xDAA320A7
_HEAD: Final = struct.Struct(">IIIIIQQIQ")
_BORN_V6, _STORED_V6 = 1 << 4, 1 << 5


def parse_address(text: str, url: str = "") -> Admin:
    """Parse a text HOST:PORT, and return the `Admin` of this port. Raises UsageError if the text has another form.

    `url`: the cluster's address, whose credentials, namespace and encryption the `Admin` then uses.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"{text!r} must be the HOST:PORT of a broker's administration port (listenPort, 10911).")
    return _admin(host, int(port), url) if url else Admin(host, int(port))


def brokers_of(url: str, *, timeout_seconds: float = 10.0) -> list[Admin]:
    """Return the administration ports in the address of a cluster (outbox.rocketmq.address).

    If the address names no brokers, the list is empty. Raises ConfigurationError.
    """
    return [
        _admin(first.host, first.port, url, timeout_seconds, tuple(replicas)) for first, *replicas in parse(url).brokers
    ]


def _admin(host: str, port: int, url: str, timeout_seconds: float = 10.0, replicas: tuple[HostPort, ...] = ()) -> Admin:
    address = parse(url)
    return Admin(
        host,
        port,
        timeout_seconds,
        replicas=replicas,
        namespace=address.namespace,
        access_key=address.access_key,
        secret=address.secret,
        tls=address.tls_to_brokers,
    )


@dataclass(frozen=True)
class Admin:
    """The administration port of one broker (listenPort, 10911 by default). Every call may raise BrokerError.

    With `access_key` and `secret`, every request is signed, which a broker with access control (ACL) requires. With
    `tls`, the connection is encrypted, and the broker's certificate is verified. With `replicas`, each request goes to
    the replica that is the master now.
    """

    host: str
    port: int
    timeout_seconds: float = 10.0
    replicas: tuple[HostPort, ...] = ()
    namespace: str = ""
    access_key: str = ""
    secret: str = field(default="", repr=False)
    tls: bool = False

    def name(self, name: str) -> str:
        """Return the name of a topic or group on this server: in RocketMQ's form, and in the namespace."""
        return in_namespace(self.namespace, wire_name(name))

    def create_topic(self, topic: Topic) -> None:
        """Create the topic, or update it."""
        self._ask(
            _UPDATE_TOPIC,
            {
                "topic": self.name(topic.name),
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
        """Create the subscription's group, or update it. A new group starts at the oldest message.

        If a new group had no stored offset, RocketMQ would start it near the newest message. A group with an ordered
        mode is an orderly group in RocketMQ. The limit of attempts on the server is very high, so that a message
        reaches the limit of the subscription first.
        """
        group = self.name(subscription.group)
        body = {
            "groupName": group,
            "consumeEnable": True,
            "consumeFromMinEnable": True,
            "consumeMessageOrderly": subscription.mode is not Mode.CONCURRENT,
            "retryMaxTimes": _NO_LIMIT,
        }
        self._ask(_UPDATE_GROUP, {}, json.dumps(body).encode())
        for number in range(topic.queue_count):
            queue = {"consumerGroup": group, "topic": self.name(subscription.topic), "queueId": number}
            if self._offset(queue) == 0:
                self._ask(_UPDATE_OFFSET, {**queue, "commitOffset": 0})

    def stored_offset(self, group: str, topic: str, queue: int = 0) -> int:
        """Return the offset that a group has stored for a queue, or 0 if the group has stored none.

        The caller gives the names of group and topic in RocketMQ's form.
        """
        return self._offset({"consumerGroup": group, "topic": topic, "queueId": queue})

    def store_offset(self, group: str, topic: str, offset: int, queue: int = 0) -> None:
        """Store the offset of a group. If the group does not exist, create it."""
        fields = {"consumerGroup": group, "topic": topic, "queueId": queue, "commitOffset": offset}
        self._ask(_UPDATE_GROUP, {}, json.dumps({"groupName": group}).encode())
        self._ask(_UPDATE_OFFSET, fields)

    def _offset(self, queue: Mapping[str, Any]) -> int:
        code, answer, _ = self._exchange(self._place(), _QUERY_OFFSET, queue, b"")
        return 0 if code == _NOT_FOUND else int(answer.get("extFields", {}).get("offset", 0))

    def ask(self, code: int, fields: Mapping[str, Any], body: bytes = b"") -> tuple[int, Mapping[str, Any], bytes]:
        """Return the broker's answer to a request: its code (0 is success), its header and its body."""
        return self._exchange(self._place(), code, fields, body)

    def each(self) -> list[Admin]:
        """Return the ports of the broker and of its replicas, whichever is the master."""
        every = (HostPort(self.host, self.port), *self.replicas)
        return [replace(self, host=one.host, port=one.port, replicas=()) for one in every]

    def master(self) -> Admin:
        """Return the port of the broker that is the master now. Raises BrokerUnavailable."""
        host, port = self._place()
        return replace(self, host=host, port=port, replicas=())

    def _place(self) -> tuple[str, int]:
        """Return the address of the master. Raises BrokerUnavailable."""
        if not self.replicas:
            return self.host, self.port
        every = (HostPort(self.host, self.port), *self.replicas)
        for one in every:
            try:
                _, _, body = self._exchange((one.host, one.port), _BROKER_CONFIG, {}, b"")
            except BrokerUnavailable:
                continue
            # The number 0 is the master's. A replica that is promoted gets it.
            if b"brokerId=0" in body.splitlines():
                return one.host, one.port
        raise BrokerUnavailable(f"none of {', '.join(map(str, every))} is the master of its replicas now.")

    def _ask(self, code: int, fields: Mapping[str, Any], body: bytes = b"") -> None:
        address = self._place()
        status, answer, _ = self._exchange(address, code, fields, body)
        if status != _SUCCESS:
            why = answer.get("remark") or f"code {status}"
            raise BrokerError(f"RocketMQ at {address[0]}:{address[1]} refused request {code}: {why}.")

    def _exchange(
        self, address: tuple[str, int], code: int, fields: Mapping[str, Any], body: bytes
    ) -> tuple[int, Mapping[str, Any], bytes]:
        header = {
            "code": code,
            "language": "PYTHON",
            "version": 0,
            "opaque": 1,
            "flag": 0,
            "extFields": self._signed({name: _text(value) for name, value in fields.items()}, body),
            "serializeTypeCurrentRPC": "JSON",
        }
        encoded = json.dumps(header).encode()
        frame = struct.pack(">II", 4 + len(encoded) + len(body), len(encoded)) + encoded + body
        where = f"{address[0]}:{address[1]}"
        try:
            with self._connect(address) as connection:
                connection.sendall(frame)
                status, answer, rest = _answer(connection)
        except OSError as error:
            raise BrokerUnavailable(f"RocketMQ at {where} cannot be administered: {error}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise _no_broker(where) from error
        if status == _NOT_SUPPORTED:
            # A name server uses the same protocol, but refuses requests that only a broker can answer.
            raise _no_broker(where)
        return status, answer, rest

    def _connect(self, address: tuple[str, int]) -> socket.socket:
        connection = socket.create_connection(address, self.timeout_seconds)
        if not self.tls:
            return connection
        try:
            return _certificates().wrap_socket(connection, server_hostname=address[0])
        except BaseException:
            connection.close()
            raise

    def _signed(self, fields: dict[str, str], body: bytes) -> dict[str, str]:
        """Add the access key and the signature: an HMAC over all values, in the order of their names, and the body."""
        if not self.access_key:
            return fields
        fields = {**fields, "AccessKey": self.access_key}
        signed = "".join(fields[name] for name in sorted(fields)).encode() + body
        digest = hmac.new(self.secret.encode(), signed, hashlib.sha1).digest()
        return {**fields, "Signature": base64.b64encode(digest).decode()}


def _certificates() -> ssl.SSLContext:
    # RocketMQ's gRPC library reads its certificates from the file in this variable. So one file serves both protocols.
    return ssl.create_default_context(cafile=os.environ.get("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"))


def _answer(connection: socket.socket) -> tuple[int, Mapping[str, Any], bytes]:
    """Read one frame.

    Raises OSError. Raises ValueError, KeyError or TypeError if the frame is not an answer of RocketMQ.
    """
    total, length = struct.unpack(">II", _exactly(connection, 8))
    # The highest byte is the encoding of the header.
    length &= 0xFFFFFF
    if not 4 + length <= total <= _LARGEST_FRAME:
        raise ValueError(f"a frame of {total} bytes with a header of {length} bytes is not an answer of RocketMQ")
    answer = json.loads(_exactly(connection, length))
    return int(answer["code"]), answer, _exactly(connection, total - 4 - length)


def _no_broker(where: str) -> BrokerUnavailable:
    return BrokerUnavailable(
        f"{where} does not answer like a RocketMQ broker: give the administration port of a broker (listenPort, "
        "10911), not the port of the proxy (8081) or of the name server."
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


# -- stored messages -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One message of a queue.

    The attributes have the same names as in the client library, so that `outbox.rocketmq.wire` can convert the message.
    `stored_topic` and `queue` say where the broker stores the message, `place` is its position in the broker's log.
    """

    stored_topic: str
    queue: int
    offset: int
    place: int
    body: bytes
    properties: Mapping[str, str]
    born_timestamp: int
    stored_timestamp: int
    delivery_timestamp: None = None
    message_group: None = None

    @property
    def topic(self) -> str:
        """The topic to which the message was sent.

        A message that RocketMQ holds back or gives up is stored in another topic.
        """
        return self.properties.get("REAL_TOPIC") or self.properties.get("RETRY_TOPIC") or self.stored_topic

    @property
    def tag(self) -> str:
        """The message's tag."""
        return self.properties.get("TAGS", "")

    @property
    def message_id(self) -> str:
        """The id that the producer's library gave to the message."""
        return self.properties.get("UNIQ_KEY", "")


def end_of_queue(broker: Admin, topic: str, queue: int = 0) -> int:
    """Return the offset after the newest message, or 0 if the topic does not exist. Raises BrokerError."""
    status, answer, _ = broker.ask(_MAX_OFFSET, {"topic": topic, "queueId": queue})
    if status == _TOPIC_NOT_FOUND:
        return 0
    if status:
        raise BrokerError(
            f"RocketMQ did not return the end offset of topic {topic!r}: {answer.get('remark') or status}."
        )
    return int(answer.get("extFields", {}).get("offset", 0))


def read_stored(broker: Admin, group: str, topic: str, offset: int, queue: int = 0) -> Iterator[Stored]:
    """Return the messages from `offset` to the present end of the queue, oldest first. Raises BrokerError.

    `group` is an existing consumer group. The function does not change the stored offset of this group.
    """
    end = end_of_queue(broker, topic, queue)
    while offset < end:
        fields = {
            "consumerGroup": group,
            "topic": topic,
            "queueId": queue,
            "queueOffset": offset,
            "maxMsgNums": _AT_ONCE,
            "sysFlag": _WITH_SUBSCRIPTION,
            "commitOffset": 0,
            "suspendTimeoutMillis": 0,
            "subscription": "*",
            "subVersion": 0,
            "expressionType": "TAG",
        }
        status, answer, body = broker.ask(_PULL, fields)
        if status in (_TOPIC_NOT_FOUND, _NOTHING):
            return
        if status != _FOUND and status not in _ELSEWHERE:
            raise BrokerError(f"RocketMQ refused to read topic {topic!r}: {answer.get('remark') or status}.")
        if status == _FOUND:
            yield from messages_in(body)
        before, offset = offset, int(answer["extFields"]["nextBeginOffset"])
        if offset <= before:
            return


def by_queue(body: bytes) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    """Yield each queue in the body of statistics, with its offsets."""
    for queue, offsets in _QUEUES.findall(body):
        yield json.loads(queue), json.loads(offsets)


def messages_in(data: bytes) -> Iterator[Stored]:
    """Return the messages in the body of an answer."""
    position = 0
    while position < len(data):
        (size,) = struct.unpack_from(">I", data, position)
        yield _message(data[position : position + size])
        position += size


def _message(data: bytes) -> Stored:
    _, magic, _, queue, _, offset, place, flags, born_at = _HEAD.unpack_from(data)
    position = _HEAD.size + (20 if flags & _BORN_V6 else 8)
    (stored_at,) = struct.unpack_from(">Q", data, position)
    # Skip three fields: the host that stored the message, the number of retries, and the offset of the half message.
    position += 8 + (20 if flags & _STORED_V6 else 8) + 4 + 8
    body, position = _part(data, position, ">I")
    topic, position = _part(data, position, ">B" if magic == _MAGIC_OF_SHORT_TOPIC else ">H")
    properties, _ = _part(data, position, ">H")
    pairs = (pair.partition("\x01") for pair in properties.decode(errors="replace").split("\x02") if pair)
    return Stored(
        stored_topic=topic.decode(errors="replace"),
        queue=queue,
        offset=offset,
        place=place,
        body=body,
        properties={name: value for name, _, value in pairs},
        born_timestamp=born_at,
        stored_timestamp=stored_at,
    )


def _part(data: bytes, position: int, form: str) -> tuple[bytes, int]:
    (length,) = struct.unpack_from(form, data, position)
    begin = position + struct.calcsize(form)
    return data[begin : begin + length], begin + length
