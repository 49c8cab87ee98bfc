"""Counts the unfinished work on a RocketMQ broker through its administration port, before a project leaves RocketMQ.

RocketMQ keeps the undecided half messages of all services in one internal queue. Another internal queue has messages of
all services: the messages that consumers have received but not acknowledged, and the messages that wait for a retry. So
the counts of these two internal queues include the messages of other services.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from outbox.errors import BrokerError
from outbox.ports import LeftoverWork
from outbox.rocketmq import exhausted
from outbox.rocketmq.admin import Admin, read_stored
from outbox.rocketmq.declarations import wire_name
from outbox.rocketmq.exhausted import READER

_MAX_OFFSET: Final = 30
_CONSUMER_OFFSET: Final = 14
_TIMER_PROGRESS: Final = 60
_TOPIC_STATISTICS: Final = 202
_CONSUMER_STATISTICS: Final = 208
_TOPIC_NOT_FOUND: Final = 17

HALVES: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
CHECKER: Final = "CID_RMQ_SYS_TRANS"
_REVIVE: Final = "rmq_sys_REVIVE_LOG_"
_TIMERS: Final = "rmq_sys_wheel_timer"
# RocketMQ writes a map whose keys are objects (queues). Such a map is not JSON.
_QUEUES: Final = re.compile(rb"(\{[^{}]*\}):(\{[^{}]*\})")


class Timers:
    """Counts the delayed messages of the brokers, which RocketMQ keeps in a queue of its own.

    Use one instance for all counts, because an instance reads each delayed message only once.

    RocketMQ stores its own counts (GET_TIMER_METRICS) only every ten seconds. After a crash of RocketMQ, the changes of
    the last seconds are missing in these counts, permanently. So a count of RocketMQ may become negative, or may never
    become zero.
    """

    def __init__(self) -> None:
        self._read: Counter[Admin] = Counter()
        self._waiting: dict[Admin, list[tuple[int, str]]] = {}

    def waiting(self, broker: Admin) -> Counter[str]:
        """Return the number of delayed messages per topic, by the topic's name in RocketMQ. Raises BrokerError."""
        status, answer, body = broker.ask(_TIMER_PROGRESS, {})
        if status:
            raise BrokerError(f"RocketMQ did not return its delayed messages: {answer.get('remark') or status}.")
        # RocketMQ has delivered all delayed messages that were due before the time `reached`.
        (reached,) = struct.unpack_from(">q", body)
        waiting = [one for one in self._waiting.get(broker, ()) if one[0] >= reached]
        for message in read_stored(broker, READER, _TIMERS, self._read[broker]):
            self._read[broker] = message.offset + 1
            due = int(message.properties.get("TIMER_OUT_MS", 0))
            if due >= reached:
                waiting.append((due, message.properties.get("REAL_TOPIC", "")))
        self._waiting[broker] = waiting
        return Counter(topic for _, topic in waiting)


def left(
    brokers: Sequence[Admin],
    subscriptions: Iterable[tuple[str, str]],
    topics: Iterable[str],
    timers: Timers,
    *,
    producer_group: str = "",
) -> LeftoverWork:
    """Return the unfinished work of subscriptions (group, topic), topics and producer group. Raises BrokerError."""
    found = Counter[str]()
    dead = Counter[str]()
    groups: dict[str, set[str]] = {}
    for group, topic in subscriptions:
        groups.setdefault(group, set()).add(topic)
    written = 0
    for broker in brokers:
        # The counts below follow the way of a message through the broker. So if a message moves while this code counts,
        # a later count or `written` includes the message.
        halves, undecided = _halves(broker)
        written += halves
        found["half messages (of all services) are undecided, or RocketMQ has not processed their decision yet"] += (
            undecided
        )
        given_up = exhausted.waiting(broker, producer_group) if producer_group else 0
        found["half messages were given up by RocketMQ's check-back, and the ledger was not asked about them"] += (
            given_up
        )
        delayed = timers.waiting(broker)
        for topic in topics:
            found[f"messages on topic {topic!r} wait for their delivery time"] += delayed[broker.name(topic)]
        held = sum(count for name, count in delayed.items() if name.startswith(_REVIVE))
        found["messages (of all services) are at a consumer, were at a consumer a moment ago, or wait for a retry"] += (
            held
        )
        for group, subscribed in groups.items():
            ends, lag = _group(broker, group, subscribed)
            written += ends
            found[f"messages were not handled by group {group!r}"] += lag
            dead[f"messages of group {group!r} are dead letters (topic %DLQ%{wire_name(group)})"] += _dead(
                broker, group
            )
    return LeftoverWork(_said(found), _said(dead), written)


def _said(counts: Counter[str]) -> list[str]:
    return [f"{count} {what}" for what, count in counts.items() if count]


def _halves(broker: Admin) -> tuple[int, int]:
    """Return two numbers: half messages ever written, and half messages that are undecided on the server."""
    queue = {"topic": HALVES, "queueId": 0}
    end = _number(broker, _MAX_OFFSET, queue)
    return end, end - _number(broker, _CONSUMER_OFFSET, {"consumerGroup": CHECKER, **queue})


def _number(broker: Admin, code: int, fields: dict[str, Any]) -> int:
    # The result is 0 while the topic or the group does not exist.
    status, answer, _ = broker.ask(code, fields)
    return int(answer.get("extFields", {}).get("offset", 0)) if status == 0 else 0


def _group(broker: Admin, group: str, topics: Iterable[str]) -> tuple[int, int]:
    """Return two numbers: messages ever written for the group (with redeliveries), and unacknowledged messages."""
    status, answer, body = broker.ask(_CONSUMER_STATISTICS, {"consumerGroup": broker.name(group)})
    if status:
        raise BrokerError(f"RocketMQ has no consumer group {group!r}: {answer.get('remark') or status}.")
    end, lag, seen = 0, 0, set()
    for queue, offsets in by_queue(body):
        seen.add(queue["topic"])
        end += offsets["brokerOffset"]
        lag += max(0, offsets["brokerOffset"] - max(0, offsets["consumerOffset"]))
    if missing := sorted(topic for topic in topics if broker.name(topic) not in seen):
        raise BrokerError(
            f"RocketMQ has no offsets of group {group!r} on topic {missing[0]!r}. If the group does not exist there, "
            f"create it with `manage.py outbox_install --create`."
        )
    return end, lag


def _dead(broker: Admin, group: str) -> int:
    status, answer, body = broker.ask(_TOPIC_STATISTICS, {"topic": dead_letter_topic(broker, group)})
    if status == _TOPIC_NOT_FOUND:
        return 0
    if status:
        raise BrokerError(f"RocketMQ did not return the number of dead letters: {answer.get('remark') or status}.")
    return sum(offsets["maxOffset"] - offsets["minOffset"] for _, offsets in by_queue(body))


def dead_letter_topic(broker: Admin, group: str) -> str:
    """Return the name of the topic with a group's dead letters."""
    return f"%DLQ%{broker.name(group)}"


def by_queue(body: bytes) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    for queue, offsets in _QUEUES.findall(body):
        yield json.loads(queue), json.loads(offsets)
