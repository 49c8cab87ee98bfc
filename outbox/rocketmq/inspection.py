"""Reads what an operator asks about a RocketMQ cluster, through the administration ports of its brokers.

Every function sends read requests only, and moves no offset of a group. A figure that RocketMQ does not have is None,
never zero. RocketMQ keeps the half messages of all services in one queue per broker, so `open_halves` reads that queue
and returns the half messages of this project.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from outbox.codec import BytesCodec
from outbox.errors import BrokerError, BrokerUnavailable
from outbox.message import Message, stored_message
from outbox.ports import LeftoverWork
from outbox.rocketmq import stranded
from outbox.rocketmq.admin import CHECKER, HALVES, Admin, Stored, by_queue, end_of_queue, read_stored
from outbox.rocketmq.declarations import wire_name
from outbox.rocketmq.stranded import READER, asked_of_group, decided_offsets
from outbox.rocketmq.wire import foreign_id, from_wire
from outbox.utils.safe_text import error_line

_TIMER_PROGRESS: Final = 60
_TOPIC_STATISTICS: Final = 202
_CONSUMER_STATISTICS: Final = 208
_ALL_GROUPS: Final = 201
_OK: Final = 0
_TOPIC_NOT_FOUND: Final = 17
_REVIVE: Final = "rmq_sys_REVIVE_LOG_"
_TIMERS: Final = "rmq_sys_wheel_timer"


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicFigures:
    """A declared topic on all brokers. `stored`: the messages that RocketMQ still has; 0 if the topic is missing."""

    topic: str
    queues: int
    stored: int
    written: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFigures:
    """A group of the project on one of its topics.

    `lag`: messages that no consumer of the group has received, `retrying`: messages that came back after their wait for
    another attempt, and that no consumer has received again. RocketMQ does not report the messages that a consumer
    handles now, or that still wait for an attempt, per group. `oldest_at`: when the oldest message of `lag` was stored.
    `is_known` is False if a broker does not have the group.
    """

    group: str
    topic: str
    lag: int = 0
    retrying: int = 0
    oldest_at: datetime | None = None
    is_known: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenHalf:
    """A half message that RocketMQ still asks about, or has given up (`is_given_up`).

    `sent_at` is the time at which the producer sent it, by the producer's clock.
    """

    transaction_id: UUID
    producer_group: str
    ledger_id: UUID | None
    message: Message
    sent_at: datetime
    checks: int
    broker: str
    is_given_up: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Letter:
    """A dead letter in %DLQ%GROUP. `stored_milliseconds`, since 1970, is the time at which it became a dead letter.

    `problem`: why the message cannot be read; it then has only its id, topic, body and time.
    """

    group: str
    message: Message
    stored_milliseconds: int
    broker: str
    problem: str = ""

    @property
    def dead_at(self) -> datetime:
        """The time at which the message became a dead letter, by the broker's clock."""
        return _moment(self.stored_milliseconds)


def topic_figures(brokers: Sequence[Admin], topics: Iterable[str]) -> list[TopicFigures]:
    """Return the figures of topics, one for each. Raises BrokerError."""
    return [_topic(brokers, topic) for topic in topics]


def _topic(brokers: Sequence[Admin], topic: str) -> TopicFigures:
    queues = stored = written = 0
    for broker in brokers:
        for first, end in _ranges(broker, broker.name(topic)).values():
            queues, stored, written = queues + 1, stored + end - first, written + end
    return TopicFigures(topic=topic, queues=queues, stored=stored, written=written)


def _ranges(broker: Admin, topic: str) -> Mapping[int, tuple[int, int]]:
    """Return the first offset and the end of each queue of a topic; nothing if the broker does not have the topic."""
    status, answer, body = broker.ask(_TOPIC_STATISTICS, {"topic": topic})
    if status == _TOPIC_NOT_FOUND:
        return {}
    _require(status, answer, f"the offsets of topic {topic!r}")
    return {queue["queueId"]: (offsets["minOffset"], offsets["maxOffset"]) for queue, offsets in by_queue(body)}


def group_figures(brokers: Sequence[Admin], subscriptions: Iterable[tuple[str, str]]) -> list[GroupFigures]:
    """Return the figures of subscriptions (group, topic), one for each. Raises BrokerError."""
    found = {pair: GroupFigures(group=pair[0], topic=pair[1]) for pair in subscriptions}
    for broker in brokers:
        for group in dict.fromkeys(group for group, _ in found):
            # RocketMQ has no error code of its own for a missing group.
            status, _, body = broker.ask(_CONSUMER_STATISTICS, {"consumerGroup": broker.name(group)})
            at = (
                {(queue["topic"], queue["queueId"]): offsets for queue, offsets in by_queue(body)} if not status else {}
            )
            for (_, topic), figures in [one for one in found.items() if one[0][0] == group]:
                found[group, topic] = _with_broker(broker, figures, at)
    return list(found.values())


def _with_broker(broker: Admin, figures: GroupFigures, at: Mapping[tuple[str, int], Mapping[str, int]]) -> GroupFigures:
    """Add the queues of one broker to the figures of a subscription."""
    topic, retry = broker.name(figures.topic), _retry_topic(broker, figures.group, figures.topic)
    oldest = figures.oldest_at
    lag, retrying, known = figures.lag, figures.retrying, figures.is_known
    for (name, queue), offsets in at.items():
        position = max(0, offsets["consumerOffset"])
        waiting = max(0, offsets["brokerOffset"] - position)
        if name == retry:
            retrying += waiting
        elif name == topic:
            lag, known = lag + waiting, True
            first = next(iter(read_stored(broker, READER, topic, position, queue)), None) if waiting else None
            if first is not None:
                stored_at = _moment(first.stored_timestamp)
                oldest = stored_at if oldest is None else min(oldest, stored_at)
    return replace(figures, lag=lag, retrying=retrying, oldest_at=oldest, is_known=known)


def _retry_topic(broker: Admin, group: str, topic: str) -> str:
    return f"%RETRY%{broker.name(group)}_{broker.name(topic)}"


# -- dead letters ---------------------------------------------------------------------------------------


def _dead_letter_topic(broker: Admin, group: str) -> str:
    return f"%DLQ%{broker.name(group)}"


def count_dead_letters(brokers: Sequence[Admin], group: str) -> int:
    """Return the number of dead letters of a group that RocketMQ still has. Raises BrokerError."""
    ranges = (_ranges(broker, _dead_letter_topic(broker, group)) for broker in brokers)
    return sum(end - first for of_broker in ranges for first, end in of_broker.values())


def dead_letters(brokers: Sequence[Admin], group: str) -> list[Letter]:
    """Return all dead letters of a group that RocketMQ still has, newest first. Raises BrokerError."""
    found: list[Letter] = []
    for broker in brokers:
        topic = _dead_letter_topic(broker, group)
        for queue, (first, _) in _ranges(broker, topic).items():
            for stored in read_stored(broker, READER, topic, first, queue):
                message, problem = _message(broker, stored, group)
                found.append(
                    Letter(
                        group=group,
                        message=message,
                        stored_milliseconds=stored.stored_timestamp,
                        broker=_named(broker),
                        problem=problem,
                    )
                )
    return sorted(found, key=lambda one: (-one.stored_milliseconds, str(one.message.message_id)))


def _message(broker: Admin, stored: Stored, group: str) -> tuple[Message, str]:
    """Return the message, and why it cannot be read: another program may have sent it, and it must hide no other."""
    problem = ""
    try:
        message = from_wire(stored)
    except Exception as error:
        problem = error_line(error)
        message = stored_message(
            topic=stored.topic,
            body=stored.body,
            message_id=foreign_id(stored),
            key="",
            tag="",
            headers={},
            content_type=BytesCodec.content_type,
            born_at=_moment(stored.born_timestamp),
        )
    if message.topic.startswith("%RETRY%"):
        # A message that failed before is stored under the name of the retry topic, which ends with the topic's name.
        prefix = _retry_topic(broker, group, "")
        object.__setattr__(message, "topic", message.topic.removeprefix(prefix))
    return message, problem


# -- half messages --------------------------------------------------------------------------------------


def open_halves(brokers: Sequence[Admin], producer_group: str) -> list[OpenHalf]:
    """Return the undecided half messages of a producer group, the oldest first. Raises BrokerError.

    RocketMQ notes a decision up to three seconds later (transactionOpBatchInterval). So the list may contain a half
    message that was decided in the last seconds.
    """
    found: dict[UUID, OpenHalf] = {}
    for broker in brokers:
        offsets_decided, decided = set(decided_offsets(broker)), set[UUID]()
        begin = broker.stored_offset(CHECKER, HALVES)
        for stored in read_stored(broker, READER, HALVES, begin):
            for half in _half(broker, stored, producer_group):
                # A half message that was checked has several copies, and a decision names only one of them.
                if stored.offset in offsets_decided:
                    decided.add(half.message.message_id)
                else:
                    found[half.message.message_id] = half
        for message_id in decided:
            found.pop(message_id, None)
        begin = broker.stored_offset(stranded.offsets_of(producer_group, broker.namespace), stranded.TOPIC)
        for stored in read_stored(broker, READER, stranded.TOPIC, begin):
            for half in _half(broker, stored, producer_group, is_given_up=True):
                found[half.message.message_id] = half
    return sorted(found.values(), key=lambda one: one.sent_at)


def _half(broker: Admin, stored: Stored, producer_group: str, *, is_given_up: bool = False) -> Iterator[OpenHalf]:
    about = asked_of_group(stored, broker, producer_group)
    if about is not None:
        yield OpenHalf(
            transaction_id=about.transaction_id,
            producer_group=about.producer_group,
            ledger_id=about.ledger_id,
            message=about.message,
            # RocketMQ stores a half message again with every check, and keeps only this time.
            sent_at=_moment(stored.born_timestamp),
            checks=int(stored.properties.get("TRANSACTION_CHECK_TIMES", 0)),
            broker=_named(broker),
            is_given_up=is_given_up,
        )


# -- topics and groups that a broker lacks --------------------------------------------------------------


def missing(brokers: Sequence[Admin], topics: Iterable[str], groups: Iterable[str]) -> Iterator[str]:
    """Yield a text for each topic and group that a broker or a replica does not have. Raises BrokerError.

    The proxy shows only whether any broker has a topic. A broker without the topic takes no message of this topic, and
    does not deliver those that it has stored. If a replica without the topic is promoted, it becomes such a broker. The
    function passes over a replica that does not answer. RocketMQ 5.3.2 and 5.3.3 fail to copy a topic that has
    attributes, and say so nowhere.
    """
    wanted_topics, wanted_groups = list(topics), list(groups)
    for broker in brokers:
        # This call raises BrokerUnavailable if no broker of the group answers as the master.
        reachable(broker)
        for one in broker.each():
            try:
                absent = [("topic", name) for name in wanted_topics if not _ranges(one, one.name(name))]
                known = _all_groups(one)
            except BrokerUnavailable:
                continue
            absent += [("group", name) for name in wanted_groups if one.name(name) not in known]
            for kind, name in absent:
                yield (
                    f"the broker {_named(one)} of RocketMQ has no {kind} {name!r}: run `manage.py outbox_install "
                    "--create`. A replica copies topics and groups from its master every few seconds, but not with "
                    "RocketMQ 5.3.2 and 5.3.3."
                )


def _all_groups(broker: Admin) -> Collection[str]:
    """Return the consumer groups of a broker. A request about one group would create a group that is missing."""
    status, answer, body = broker.ask(_ALL_GROUPS, {})
    _require(status, answer, "its consumer groups")
    found: Mapping[str, object] = json.loads(body)["subscriptionGroupTable"]
    return found.keys()


def reachable(broker: Admin) -> None:
    """Raise BrokerError if the broker does not answer like a broker with access for this client."""
    end_of_queue(broker, HALVES)


def _named(broker: Admin) -> str:
    return f"{broker.host}:{broker.port}"


def _moment(milliseconds: int) -> datetime:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        # Any client may have sent it, and it must not hide the other messages.
        return datetime.max.replace(tzinfo=UTC)


def _require(status: int, answer: Mapping[str, object], what: str) -> None:
    if status != _OK:
        raise BrokerError(f"RocketMQ did not return {what}: {answer.get('remark') or f'code {status}'}.")


# -- unfinished work ------------------------------------------------------------------------------------
#
# RocketMQ keeps the undecided half messages of all services in one internal queue. Another one has messages of all
# services: those that consumers have received but not acknowledged, and those that wait for a retry. So the counts of
# these two queues include the messages of other services.


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
        _require(status, answer, "its delayed messages")
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
        halves = end_of_queue(broker, HALVES)
        undecided = halves - broker.stored_offset(CHECKER, HALVES)
        written += halves
        found["half messages (of all services) are undecided, or RocketMQ has not processed their decision yet"] += (
            undecided
        )
        given_up = stranded.waiting(broker, producer_group) if producer_group else 0
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
            letters = f"messages of group {group!r} are dead letters (topic %DLQ%{wire_name(group)})"
            dead[letters] += count_dead_letters([broker], group)
    return LeftoverWork(_said(found), _said(dead), written)


def _said(counts: Counter[str]) -> list[str]:
    return [f"{count} {what}" for what, count in counts.items() if count]


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
