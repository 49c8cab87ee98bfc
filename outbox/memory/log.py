"""The storage of the in-memory broker: messages, their decisions and checks, and the queues that consumers read.

The caller of a method must hold the log's lock.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from uuid import UUID

from outbox.errors import InvalidMessage, UnknownTopic
from outbox.message import Message, SendReceipt
from outbox.recall import RecallStatus
from outbox.time_limit import ends_at
from outbox.topic import Topic, select_shard
from outbox.transaction import (
    GROUP_AWAY_SECONDS,
    Answer,
    Check,
    CheckSettings,
    Decision,
    HalfTransaction,
    ParkReason,
)


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
    entries: list[Entry] = field(default_factory=list)
    decision: Decision = Decision.UNKNOWN
    due_at: datetime | None = None
    checks: int = 0
    parked: ParkReason | None = None
    asked_at: datetime | None = None


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
        transaction = Transaction(
            messages[0].message_id, half, self._now(), immune_until or self._now(), due_at=immune_until
        )
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
        entries = [self._entries[message.message_id] for message in messages]
        return [
            SendReceipt(
                message_id=entry.message.message_id,
                transaction_id=entry.transaction.transaction_id,
                topic=entry.message.topic,
                position=entry.log_id,
            )
            for entry in entries
        ]

    def entry(self, message_id: UUID) -> Entry:
        """Return a stored message with its place in the log."""
        return self._entries[message_id]

    def find(self, transaction_id: UUID) -> Transaction | None:
        """Return the transaction, or None if the id is unknown."""
        return self._transactions.get(transaction_id)

    def undecided(self) -> list[Transaction]:
        """Return the undecided transactions, oldest first."""
        return [t for t in self._transactions.values() if t.decision is Decision.UNKNOWN]

    # -- deciding and queueing -----------------------------------------------------------------------

    def decide(self, transaction: Transaction, decision: Decision) -> None:
        """Decide an undecided transaction.

        After a COMMIT, put the messages into their queues in order, each message at its delivery time.
        """
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

    def find_message(self, message_id: UUID) -> Message | None:
        """Return the stored message, or None if the id is unknown."""
        entry = self._entries.get(message_id)
        return entry.message if entry is not None else None

    def scheduled(self) -> list[Message]:
        """Return the messages that wait for their delivery time."""
        return [entry.message for _, _, entry in self._scheduled]

    def _oldest_undecided_by_key(self) -> dict[tuple[str, str], int]:
        # The loop goes backwards, so that the oldest entry of a key is written last and stays in the dictionary.
        return {
            (entry.message.topic, entry.message.key): entry.log_id
            for transaction in reversed(self.undecided())
            for entry in reversed(transaction.entries)
            if self._holds_up_its_key(entry)
        }

    def _holds_up_its_key(self, entry: Entry) -> bool:
        topic = self._topics[entry.message.topic]
        released = entry.transaction.parked is not None and topic.on_park == "release"
        return topic.is_fifo and entry.message.deliver_at is None and not released

    def queues_of(self, topic: str) -> list[tuple[int, list[Entry]]]:
        """Return the queues of a topic that have entries, by number. The index of an entry is its offset."""
        return sorted(
            ((number, queue) for (name, number), queue in self._queues.items() if name == topic),
            key=lambda item: item[0],
        )


class CheckBackSide:
    """Check-back for the undecided transactions of a log.

    The rules are those of the PostgreSQL broker (outbox/broker/transaction).
    """

    def __init__(
        self, log: Log, settings: CheckSettings, *, now: Callable[[], datetime], report: Callable[[str], None]
    ) -> None:
        self._log = log
        self._settings = settings
        self._now = now
        self._report = report
        self._seen_at: dict[str, datetime] = {}

    def first_due(self, immunity_seconds: int | None) -> datetime:
        """Return the end of the immunity for a half message that is stored now."""
        immunity = self._settings.immunity_seconds if immunity_seconds is None else immunity_seconds
        return self._in(immunity)

    def hint(self, transaction_id: UUID) -> None:
        """Make the transaction due for a check now."""
        transaction = self._log.find(transaction_id)
        if transaction is not None and transaction.due_at is not None:
            transaction.due_at = min(transaction.due_at, self._now())

    def claim(self, producer_group: str, limit: int) -> list[Check]:
        """Claim the group's due transactions, parked transactions last.

        If the group has not claimed any checks for GROUP_AWAY_SECONDS, its parked transactions become due.
        """
        if self._is_away(producer_group):
            self._ask_parked(producer_group)
        self._seen_at[producer_group] = self._now()
        due = [t for t in self._of(producer_group) if t.due_at is not None and t.due_at <= self._now()]
        due.sort(key=lambda transaction: transaction.parked is not None)
        for transaction in due[:limit]:
            transaction.asked_at = self._now()
            transaction.due_at = self._next_due(transaction)
        return [self._as_check(transaction) for transaction in due[:limit]]

    def _next_due(self, transaction: Transaction) -> datetime:
        if transaction.parked is not None:
            return self._in(self._settings.parked_recheck_seconds)
        if self._now() < transaction.immune_until:
            return transaction.immune_until
        return self._in(self._settings.recheck_seconds)

    def _ask_parked(self, producer_group: str) -> None:
        not_since = self._in(-GROUP_AWAY_SECONDS)
        for transaction in self._of(producer_group):
            if transaction.parked is not None and (transaction.asked_at is None or transaction.asked_at < not_since):
                transaction.due_at = self._now()

    def postpone(self, transaction: Transaction, answer: Answer) -> None:
        """Count an UNKNOWN answer. If the limit is reached, park the transaction."""
        transaction.checks += answer.counts and self._now() >= transaction.immune_until
        if transaction.parked is None and transaction.checks >= self._settings.max_checks:
            self._park(transaction, ParkReason.CHECKS, self._in(self._settings.parked_recheck_seconds))

    def park_overdue(self) -> None:
        """Park the transactions that are older than the age limit, with or without answers."""
        for transaction in self._log.undecided():
            over_at = transaction.immune_until + timedelta(seconds=self._settings.max_age_seconds)
            if transaction.half is None or transaction.parked is not None or self._now() <= over_at:
                continue
            if self._is_away(transaction.half.producer_group):
                self._park(transaction, ParkReason.UNANSWERED, self._now())
            else:
                self._park(transaction, ParkReason.AGE, self._in(self._settings.parked_recheck_seconds))

    def _park(self, transaction: Transaction, reason: ParkReason, due_at: datetime) -> None:
        transaction.parked = reason
        transaction.due_at = due_at
        self._report(f"parked {transaction.transaction_id}: {reason}, after {transaction.checks} checks")
        # If the topic has on_park='release', later messages of the key pass the parked message.
        self._log.sequence()

    def _of(self, producer_group: str) -> list[Transaction]:
        return [t for t in self._log.undecided() if t.half is not None and t.half.producer_group == producer_group]

    def _is_away(self, producer_group: str) -> bool:
        seen_at = self._seen_at.get(producer_group)
        return seen_at is None or seen_at < self._in(-GROUP_AWAY_SECONDS)

    def _in(self, seconds: float) -> datetime:
        return self._now() + timedelta(seconds=seconds)

    def _as_check(self, transaction: Transaction) -> Check:
        half = transaction.half
        assert half is not None
        return Check(
            transaction_id=transaction.transaction_id,
            producer_group=half.producer_group,
            ledger_id=half.ledger_id,
            message=half.messages[0],
            stored_at=transaction.stored_at,
            age_seconds=(self._now() - transaction.stored_at).total_seconds(),
            checks=transaction.checks,
            may_write=self._now() >= transaction.immune_until,
        )
