"""The storage of the in-memory broker: messages, their decisions, and the queues that consumers read.

The caller of a method must hold the log's lock.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from uuid import UUID

from outbox.errors import InvalidMessage, UnknownTopic
from outbox.message import Message, SendReceipt
from outbox.recall import RecallStatus
from outbox.time_limit import ends_at
from outbox.topic import Topic, select_shard
from outbox.transaction import Decision, HalfTransaction


@dataclass
class Entry:
    """One stored message and its place in the log. `queued_at` is None until consumers can see the message."""

    log_id: int
    message: Message
    transaction: Transaction
    recalled: bool = False
    queued_at: datetime | None = None

    def is_timed_out(self, now: datetime) -> bool:
        """Whether the time limit of the message is over."""
        end = ends_at(self.message.headers, self.transaction.stored_at, self.message.deliver_at)
        return end is not None and now >= end


@dataclass
class Transaction:
    """Messages that are decided together. `half` is None if they were sent without a half message."""

    transaction_id: UUID
    half: HalfTransaction | None
    stored_at: datetime
    immune_until: datetime
    due_at: datetime
    entries: list[Entry] = field(default_factory=list)
    decision: Decision = Decision.UNKNOWN
    checks: int = 0


class Log:
    """All messages in order of arrival, and their states. Callers hold `lock`. `now` returns the time."""

    def __init__(self, topics: Iterable[Topic], *, auto_create_topics: bool, now: Callable[[], datetime]) -> None:
        self.lock = threading.RLock()
        self._topics = {topic.name: topic for topic in topics}
        self._auto_create = auto_create_topics
        self._now = now
        self._log_ids = itertools.count(1)
        self._entries: dict[UUID, Entry] = {}
        self._transactions: dict[UUID, Transaction] = {}
        self._queues: defaultdict[tuple[str, int], list[Entry]] = defaultdict(list)
        self._scheduled: list[tuple[datetime, int, Entry]] = []
        self._held: list[Entry] = []

    def immutable(self) -> list[object]:
        """Return what a copy of this log shares with it. The numbers of both only have to increase."""
        messages = [entry.message for entry in self._entries.values()]
        halves = [transaction.half for transaction in self._transactions.values()]
        return [self.lock, self._log_ids, *self._topics.values(), *messages, *halves]

    # -- storing --------------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """Return the topic. If automatic creation is on, create an undeclared topic. Else raises UnknownTopic."""
        if name not in self._topics:
            if not self._auto_create:
                raise UnknownTopic(
                    f"topic {name!r} is not declared. Declare the topic, or use one of: "
                    f"{', '.join(sorted(self._topics))}."
                )
            self._topics[name] = Topic(name=name)
        return self._topics[name]

    def check_accepts(self, messages: Sequence[Message], *, transactional: bool | None) -> None:
        """Raise InvalidMessage, UnknownTopic or MessageTypeMismatch unless all messages can be stored."""
        if not messages:
            raise InvalidMessage("there is no message to send: pass at least one.")
        for message in messages:
            self.topic(message.topic).check_accepts(message, transactional=transactional)

    def store(
        self, messages: Sequence[Message], *, half: HalfTransaction | None, immune_until: datetime | None = None
    ) -> Transaction:
        """Store messages as one transaction. The transaction is due for a check at `immune_until`.

        Messages that are stored already are not stored again. Raises InvalidMessage if the transaction would not be the
        one of these messages.
        """
        first = messages[0].message_id
        known = {one.message_id: self._entries[one.message_id] for one in messages if one.message_id in self._entries}
        if (first in known and len(known) < len({one.message_id for one in messages})) or (
            half is not None and any(entry.transaction.transaction_id != first for entry in known.values())
        ):
            raise InvalidMessage(
                f"message {next(iter(known))} was sent before, in a call with other messages: send the same messages "
                "again, or give new messages new ids. No message of this call was stored."
            )
        if first in known:
            return known[first].transaction
        now = self._now()
        transaction = Transaction(first, half, now, immune_until or now, immune_until or now)
        self._transactions[transaction.transaction_id] = transaction
        for message in messages:
            if message.message_id in self._entries:
                continue
            if message.delay is not None:
                message = replace(message, deliver_at=self._now() + message.delay, delay=None)
            # Neither the publisher nor a handler can change the stored message.
            message = replace(message, headers=MappingProxyType(dict(message.headers)))
            entry = self._entries[message.message_id] = Entry(next(self._log_ids), message, transaction)
            transaction.entries.append(entry)
        return transaction

    def receipts(self, messages: Sequence[Message]) -> list[SendReceipt]:
        return [
            SendReceipt(
                message_id=entry.message.message_id,
                transaction_id=entry.transaction.transaction_id,
                topic=entry.message.topic,
                position=entry.log_id,
            )
            for entry in (self._entries[message.message_id] for message in messages)
        ]

    def entry(self, message_id: UUID) -> Entry | None:
        """Return a stored message with its place in the log; None if the id is unknown."""
        return self._entries.get(message_id)

    def find(self, transaction_id: UUID) -> Transaction | None:
        """Return the transaction, or None if the id is unknown."""
        return self._transactions.get(transaction_id)

    def undecided(self) -> list[Transaction]:
        """Return the undecided transactions, oldest first."""
        return [t for t in self._transactions.values() if t.decision is Decision.UNKNOWN]

    # -- deciding and queueing -----------------------------------------------------------------------

    def decide(self, transaction: Transaction, decision: Decision) -> None:
        """Decide an undecided transaction. After a COMMIT, its messages go into their queues at their delivery time."""
        transaction.decision = decision
        if decision is Decision.COMMIT:
            for entry in transaction.entries:
                deliver_at = entry.message.deliver_at
                if deliver_at is not None and deliver_at > self._now():
                    heapq.heappush(self._scheduled, (deliver_at, entry.log_id, entry))
                else:
                    self._held.append(entry)
        self.sequence()

    def sequence(self) -> None:
        """Put the decided messages into queues in log order. A message waits behind an undecided message of its key."""
        while self._scheduled and self._scheduled[0][0] <= self._now():
            self._held.append(heapq.heappop(self._scheduled)[2])
        waiting, self._held = sorted(self._held, key=lambda entry: entry.log_id), []
        blocked = self._oldest_undecided_by_key()
        for entry in waiting:
            topic = self._topics[entry.message.topic]
            blocker = blocked.get((topic.name, entry.message.key)) if topic.is_fifo else None
            if blocker is not None and blocker < entry.log_id:
                self._held.append(entry)
                continue
            shard = select_shard(entry.message)
            number = (entry.log_id if shard is None else shard) % topic.queue_count
            entry.queued_at = self._now()
            self._queues[topic.name, number].append(entry)

    def recall(self, message_id: UUID) -> RecallStatus:
        """Recall a message that waits for its delivery time."""
        entry = self._entries.get(message_id)
        if entry is None:
            return RecallStatus.UNKNOWN
        self.sequence()
        waiting = [item for item in self._scheduled if item[2] is not entry]
        if len(waiting) < len(self._scheduled):
            self._scheduled = waiting
            heapq.heapify(self._scheduled)
            entry.recalled = True
            return RecallStatus.RECALLED
        if entry.recalled:
            return RecallStatus.REPEATED
        if entry.transaction.decision is Decision.UNKNOWN:
            return RecallStatus.UNDECIDED
        if entry.transaction.decision is Decision.ROLLBACK:
            return RecallStatus.ROLLED_BACK
        return RecallStatus.WAITING if entry in self._held else RecallStatus.DELIVERED

    def scheduled(self) -> list[Message]:
        """Return the messages that wait for their delivery time."""
        return [entry.message for _, _, entry in self._scheduled]

    def _oldest_undecided_by_key(self) -> dict[tuple[str, str], int]:
        # Backwards, so that the oldest entry of a key is written last.
        return {
            (entry.message.topic, entry.message.key): entry.log_id
            for transaction in reversed(self.undecided())
            for entry in reversed(transaction.entries)
            if self._topics[entry.message.topic].is_fifo and entry.message.deliver_at is None
        }

    def queues_of(self, topic: str) -> list[tuple[int, list[Entry]]]:
        """Return the queues of a topic that have entries, by number. The index of an entry is its offset."""
        return sorted(
            ((number, queue) for (name, number), queue in self._queues.items() if name == topic),
            key=lambda item: item[0],
        )
