"""Messages as a RocketMQ broker stores them, read from one queue through its administration port.

The proxy refuses system topics ("40002, cannot access system topic"), so no gRPC client can read them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from outbox.errors import BrokerError
from outbox.rocketmq.admin import Admin

_PULL: Final = 11
_MAX_OFFSET: Final = 30
_FOUND: Final = 0
_TOPIC_NOT_FOUND: Final = 17
# No message at this offset: the end of the queue (19), or another position is given instead (20, 21).
_NOTHING: Final = 19
_ELSEWHERE: Final = frozenset((20, 21))
_WITH_SUBSCRIPTION: Final = 4
_AT_ONCE: Final = 32

_MAGIC_OF_SHORT_TOPIC: Final = 0xDAA320A7
_HEAD: Final = struct.Struct(">IIIIIQQIQ")
_BORN_V6, _STORED_V6 = 1 << 4, 1 << 5


@dataclass(frozen=True, slots=True)
class Stored:
    """One message of a queue. Attributes are named as in the client library's message, for `outbox.rocketmq.wire`."""

    offset: int
    body: bytes
    properties: Mapping[str, str]
    born_timestamp: int
    stored_timestamp: int
    delivery_timestamp: None = None
    message_group: None = None

    @property
    def topic(self) -> str:
        """The topic it was sent to: a system topic stores it for that topic."""
        return self.properties.get("REAL_TOPIC", "")

    @property
    def tag(self) -> str:
        """Its tag."""
        return self.properties.get("TAGS", "")

    @property
    def message_id(self) -> str:
        """The id that its producer gave it."""
        return self.properties.get("UNIQ_KEY", "")


def end_of(broker: Admin, topic: str, queue: int = 0) -> int:
    """The offset after the newest message; 0 if the topic does not exist. Raises BrokerError."""
    status, answer, _ = broker.ask(_MAX_OFFSET, {"topic": topic, "queueId": queue})
    if status == _TOPIC_NOT_FOUND:
        return 0
    if status:
        raise BrokerError(f"RocketMQ does not say how long topic {topic!r} is: {answer.get('remark') or status}.")
    return int(answer.get("extFields", {}).get("offset", 0))


def read(broker: Admin, group: str, topic: str, offset: int, queue: int = 0) -> Iterator[Stored]:
    """The messages from `offset` to the present end, oldest first. Raises BrokerError.

    `group` is an existing consumer group. Reading changes nothing for it.
    """
    end = end_of(broker, topic, queue)
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
            raise BrokerError(f"RocketMQ does not let topic {topic!r} be read: {answer.get('remark') or status}.")
        if status == _FOUND:
            yield from _messages(body)
        before, offset = offset, int(answer["extFields"]["nextBeginOffset"])
        if offset <= before:
            return


def _messages(data: bytes) -> Iterator[Stored]:
    position = 0
    while position < len(data):
        (size,) = struct.unpack_from(">I", data, position)
        yield _message(data[position : position + size])
        position += size


def _message(data: bytes) -> Stored:
    _, magic, _, _, _, offset, _, flags, born_at = _HEAD.unpack_from(data)
    position = _HEAD.size + (20 if flags & _BORN_V6 else 8)
    (stored_at,) = struct.unpack_from(">Q", data, position)
    # The host that stored it, the number of its retries, and the offset of its half message.
    position += 8 + (20 if flags & _STORED_V6 else 8) + 4 + 8
    body, position = _part(data, position, ">I")
    _, position = _part(data, position, ">B" if magic == _MAGIC_OF_SHORT_TOPIC else ">H")
    properties, _ = _part(data, position, ">H")
    pairs = (pair.partition("\x01") for pair in properties.decode(errors="replace").split("\x02") if pair)
    return Stored(offset, body, {name: value for name, _, value in pairs}, born_at, stored_at)


def _part(data: bytes, position: int, form: str) -> tuple[bytes, int]:
    (length,) = struct.unpack_from(form, data, position)
    begin = position + struct.calcsize(form)
    return data[begin : begin + length], begin + length
