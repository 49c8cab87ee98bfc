"""What a RocketMQ broker has not finished yet, by its administration port: whoever leaves it has to know.

Undecided half messages, and messages that are held by a consumer or wait for a retry, can be counted for the whole
broker only, other services' included: RocketMQ keeps both in queues of its own.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from outbox.errors import BrokerError
from outbox.left import Left
from outbox.rocketmq.admin import Admin
from outbox.rocketmq.names import wire_name

_MAX_OFFSET: Final = 30
_CONSUMER_OFFSET: Final = 14
_TIMER_METRICS: Final = 61
_TOPIC_STATISTICS: Final = 202
_CONSUMER_STATISTICS: Final = 208
_TOPIC_NOT_FOUND: Final = 17

_HALVES: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
_CHECKER: Final = "CID_RMQ_SYS_TRANS"
_REVIVE: Final = "rmq_sys_REVIVE_LOG_"
# A map that has queues as keys, which RocketMQ writes as objects: no JSON.
_QUEUES: Final = re.compile(rb"(\{[^{}]*\}):(\{[^{}]*\})")


def left(brokers: Sequence[Admin], subscriptions: Iterable[tuple[str, str]], topics: Iterable[str]) -> Left:
    """What is left of the (group, topic) subscriptions and of the topics. Raises BrokerError."""
    found = Counter[str]()
    dead = Counter[str]()
    groups: dict[str, set[str]] = {}
    for group, topic in subscriptions:
        groups.setdefault(group, set()).add(topic)
    written = 0
    for broker in brokers:
        # Against the stream: what moves on while we look is met again, or seen in `written`.
        halves, undecided = _halves(broker)
        written += halves
        found["half messages are undecided, or were not looked at yet (of all services)"] += undecided
        delayed = _delayed(broker)
        for topic in topics:
            found[f"messages on topic {topic!r} wait for their delivery time"] += delayed[wire_name(topic)]
        held = sum(count for name, count in delayed.items() if name.startswith(_REVIVE))
        found["messages are in hand, were until just now, or wait for a retry (of all services)"] += held
        for group, subscribed in groups.items():
            ends, lag = _group(broker, group, subscribed)
            written += ends
            found[f"messages were not handled by group {group!r}"] += lag
            dead[f"messages of group {group!r} are dead letters (topic %DLQ%{wire_name(group)})"] += _dead(
                broker, group
            )
    return Left(_said(found), _said(dead), written)


def _said(counts: Counter[str]) -> list[str]:
    return [f"{count} {what}" for what, count in counts.items() if count]


def _halves(broker: Admin) -> tuple[int, int]:
    """How many half messages there ever were, and how many the server has not seen decided."""
    queue = {"topic": _HALVES, "queueId": 0}
    end = _number(broker, _MAX_OFFSET, queue)
    return end, end - _number(broker, _CONSUMER_OFFSET, {"consumerGroup": _CHECKER, **queue})


def _number(broker: Admin, code: int, fields: dict[str, Any]) -> int:
    # Neither there yet: 0.
    status, answer, _ = broker.ask(code, fields)
    return int(answer.get("extFields", {}).get("offset", 0)) if status == 0 else 0


def _delayed(broker: Admin) -> Counter[str]:
    status, answer, body = broker.ask(_TIMER_METRICS, {})
    if status:
        raise BrokerError(f"RocketMQ does not say what it delays: {answer.get('remark') or status}.")
    counts = json.loads(body).get("timingCount", {})
    return Counter({name: int(one["count"]) for name, one in counts.items()})


def _group(broker: Admin, group: str, topics: Iterable[str]) -> tuple[int, int]:
    """How much there ever was for the group, and how much of it is not acknowledged; what came back included."""
    status, answer, body = broker.ask(_CONSUMER_STATISTICS, {"consumerGroup": wire_name(group)})
    if status:
        raise BrokerError(f"RocketMQ does not know group {group!r}: {answer.get('remark') or status}.")
    end, lag, seen = 0, 0, set()
    for queue, offsets in _by_queue(body):
        seen.add(queue["topic"])
        end += offsets["brokerOffset"]
        lag += max(0, offsets["brokerOffset"] - max(0, offsets["consumerOffset"]))
    if missing := sorted(topic for topic in topics if wire_name(topic) not in seen):
        raise BrokerError(
            f"RocketMQ has no offsets of group {group!r} on topic {missing[0]!r}: was it ever created there "
            f"(manage.py outbox_rocketmq --create)?"
        )
    return end, lag


def _dead(broker: Admin, group: str) -> int:
    status, answer, body = broker.ask(_TOPIC_STATISTICS, {"topic": _dlq(group)})
    if status == _TOPIC_NOT_FOUND:
        return 0
    if status:
        raise BrokerError(f"RocketMQ does not count dead letters: {answer.get('remark') or status}.")
    return sum(offsets["maxOffset"] - offsets["minOffset"] for _, offsets in _by_queue(body))


def _dlq(group: str) -> str:
    return f"%DLQ%{wire_name(group)}"


def _by_queue(body: bytes) -> Iterator[tuple[dict[str, Any], dict[str, int]]]:
    for queue, offsets in _QUEUES.findall(body):
        yield json.loads(queue), json.loads(offsets)
