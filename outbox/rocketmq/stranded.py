"""Decides half messages that no producer decides, with the help of the ledger: those whose checks RocketMQ gave up, and
those about which it reaches no producer.

**Given up.** After `transactionCheckMax` checks (15), or after `fileReservedTime` (72 h), the broker moves an undecided
half message to the system topic TRANS_CHECK_MAX_TIME_TOPIC and sends no more checks. On each broker, this system topic
has one queue, which all services share. The ledger has no bodies, so the pass reads this topic through the
administration ports; the proxy lets no client read it. The pass moves its stored offset only past transactions that it
has decided, and publishes committed messages again. Two workers, or a worker that crashes before it stores the offset,
may publish a message twice; the inbox skips the second copy.

**Unasked.** In a cluster, RocketMQ's proxy tells the brokers only about producers of topics whose message type is
TRANSACTION. A topic of outbox has the types NORMAL and TRANSACTION by default, so no process gets its checks. Also a
promoted replica has no producers for some seconds. So a worker reads the queue of half messages through the
administration ports, and sends the ledger's decision to the broker itself.

RocketMQ stores a half message again with each check, and a promotion multiplies these copies: one broker had 100,000 of
2,103 half messages. So the pass reads the newest 20,000 entries of each queue, decides the newest copy, and then rolls
back up to ten others. This loses nothing: the log has the published message before the rollbacks, and a replica copies
the log in its order. The message type TRANSACTION for all topics was rejected: programs of other teams could not send
to such a topic, and a message outside of a transaction would need two calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, TypeVar
from uuid import UUID

from outbox.errors import BrokerError, OutboxError
from outbox.message import Message
from outbox.rocketmq.admin import CHECKER, HALVES, Admin, Stored, end_of_queue, read_stored
from outbox.rocketmq.declarations import wire_name
from outbox.rocketmq.wire import CheckProperties, asked
from outbox.transaction import Answer, Check, Decision, EndStatus
from outbox.utils.safe_text import printable, shown_text

logger = logging.getLogger(__name__)

Half = TypeVar("Half")
AsCheck = Callable[[CheckProperties, float], Check]
"""Makes the check of a transaction with a half message, and of its age in seconds."""

# Every broker has this consumer group. A request to read messages must contain the name of a group, but does not change
# the group.
READER: Final = "TOOLS_CONSUMER"


def _claim(
    halves: Iterable[tuple[CheckProperties, Half]], limit: int, as_check: AsCheck
) -> tuple[dict[UUID, list[Half]], list[Check]]:
    """Return the half messages of at most `limit` transactions, and one check for each transaction."""
    claimed: dict[UUID, list[Half]] = {}
    first: dict[UUID, CheckProperties] = {}
    for about, half in halves:
        if about.transaction_id in claimed or len(claimed) < limit:
            claimed.setdefault(about.transaction_id, []).append(half)
            first.setdefault(about.transaction_id, about)
    now = datetime.now(UTC)
    return claimed, [as_check(about, (now - about.born_at).total_seconds()) for about in first.values()]


# -- given up --------------------------------------------------------------------------------------

TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"


def offsets_of(producer_group: str, namespace: str = "") -> str:
    """Return the name of the consumer group whose stored offset is this service's position in the system topic.

    Two namespaces may have the same producer group, and all namespaces share the system topic.
    """
    name = f"outbox-exhausted-{wire_name(producer_group)}"
    return f"{name}-in-{namespace}" if namespace else name


@dataclass(slots=True)
class _Progress:
    """The settled messages of one broker's queue: all offsets below `offset`, and the offsets in `done`.

    `first` is the offset of the oldest message that the broker still has.
    """

    broker: Admin
    offset: int | None = None
    first: int = 0
    done: set[int] = field(default_factory=set)


class ExhaustedChecks:
    """The transactions of one producer group that the brokers gave up.

    The class implements the functions of the broker port that check-back calls.

    If a transaction cannot be decided yet, or its message cannot be published, the next pass reads the message again.
    """

    def __init__(
        self,
        brokers: Sequence[Admin],
        producer_group: str,
        as_check: AsCheck,
        publish: Callable[[Message], object],
    ) -> None:
        self._progress = [_Progress(broker) for broker in brokers]
        self._group = producer_group
        self._as_check = as_check
        self._publish = publish
        self._claimed: dict[UUID, list[tuple[_Progress, int, CheckProperties]]] = {}
        self._warned: set[UUID] = set()

    def claim_checks(self, producer_group: str, *, limit: int = 500) -> list[Check]:
        """Return one check for each transaction of the group with unsettled messages.

        A broker that does not answer is left out, so that the transactions of the other brokers do not wait for it.
        """
        found: list[tuple[CheckProperties, tuple[_Progress, int, CheckProperties]]] = []
        for one in self._progress:
            try:
                found += [(about, (one, offset, about)) for offset, about in self._unsettled(one, producer_group)]
            except BrokerError as error:
                logger.warning("the next pass looks for given-up checks again: %s", shown_text(error))
        self._claimed, checks = _claim(found, limit, self._as_check)
        return checks

    def report_answers(self, producer_group: str, answers: Sequence[Answer]) -> list[EndStatus | None]:
        """If the answer is COMMIT, publish the messages of the transaction again under their ids."""
        return [self._settle(answer) for answer in answers]

    def _settle(self, answer: Answer) -> EndStatus | None:
        waiting = self._claimed.get(answer.transaction_id, [])
        if answer.decision is Decision.UNKNOWN:
            self._warn(answer.transaction_id, f"the outcome of the transaction is not known yet: {answer.detail}")
            return None
        for one, offset, about in waiting:
            if answer.decision is Decision.COMMIT:
                try:
                    self._publish(about.message)
                except OutboxError as error:
                    self._warn(
                        answer.transaction_id,
                        f"message {about.message.message_id} was not published: {shown_text(error)}",
                    )
                    return EndStatus.LEFT_TO_CHECK
            one.done.add(offset)
        return EndStatus.ACCEPTED

    def _warn(self, transaction_id: UUID, why: str) -> None:
        if transaction_id not in self._warned:
            self._warned.add(transaction_id)
            logger.warning(
                "RocketMQ gave up the checks of transaction %s, and %s. The worker tries again until RocketMQ "
                "deletes the message (fileReservedTime, 72 h).",
                transaction_id,
                why,
            )

    def keep(self) -> None:
        """For each broker that was read, store the offset before which all messages are settled.

        If a broker does not answer, a process that starts later asks again about settled messages of this broker.
        """
        for one in self._progress:
            if one.offset is None:
                continue
            settled = max(one.offset, one.first)
            while settled in one.done:
                settled += 1
            if settled == one.offset:
                continue
            try:
                one.broker.store_offset(offsets_of(self._group, one.broker.namespace), TOPIC, settled)
            except BrokerError as error:
                logger.warning(
                    "the next pass stores offset %d of topic %s again: %s", settled, TOPIC, shown_text(error)
                )
                continue
            one.offset = settled
            one.done = {offset for offset in one.done if offset >= settled}

    def _unsettled(self, one: _Progress, producer_group: str) -> Iterator[tuple[int, CheckProperties]]:
        if one.offset is None:
            one.offset = one.broker.stored_offset(offsets_of(self._group, one.broker.namespace), TOPIC)
        end = end_of_queue(one.broker, TOPIC)
        one.done = {offset for offset in one.done if offset < end}
        if end < one.offset:
            logger.warning(
                "topic %s of the broker at %s:%d ends at offset %d, below the settled offset %d: the broker has lost "
                "messages. The worker asks about all messages of this topic again.",
                TOPIC,
                one.broker.host,
                one.broker.port,
                end,
                one.offset,
            )
            one.offset = 0
        begins = True
        for offset, about in transactions(one.broker, one.offset):
            if begins:
                one.first, begins = offset, False
            if about is None or about.producer_group != producer_group:
                one.done.add(offset)
            elif offset not in one.done:
                yield offset, about


def transactions(broker: Admin, offset: int) -> Iterator[tuple[int, CheckProperties | None]]:
    """Yield each message from `offset` on: its offset, and its check data.

    The check data are None if another program or a program in another namespace sent the message, or if the message
    cannot be read.

    Raises BrokerError.
    """
    for message in read_stored(broker, READER, TOPIC, offset):
        try:
            about = asked(message)
            yield message.offset, about if about is None or about.namespace == broker.namespace else None
        except (ValueError, KeyError, TypeError) as error:
            logger.error(
                "the message with offset %d in topic %s cannot be read, so the worker skips it",
                message.offset,
                TOPIC,
                exc_info=printable(error),
            )
            yield message.offset, None


def waiting(broker: Admin, producer_group: str) -> int:
    """Return the number of the group's unsettled messages that this broker gave up. Raises BrokerError."""
    begin = broker.stored_offset(offsets_of(producer_group, broker.namespace), TOPIC)
    found = (about for _, about in transactions(broker, begin))
    return sum(about is not None and about.producer_group == producer_group for about in found)


# -- unasked ---------------------------------------------------------------------------------------

# RocketMQ notes in this queue which half messages are decided. The body of a note lists offsets in the queue of halves.
DECISIONS: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
_DECIDED_TAG: Final = "d"
_END: Final = 37
_RESOLUTIONS: Final = {Decision.COMMIT: 8, Decision.ROLLBACK: 12}
# After this number of checks without a decision, no producer gets the checks, or its answers are lost.
_CHECKS: Final = 2
# After promotions, RocketMQ may store many copies of each half message, all of them with every check. The newest copies
# are at the end of the queue. RocketMQ has replaced the older copies, so a decision about an older copy has no effect.
_NEWEST_STORED: Final = 20_000
_OTHER_COPIES: Final = 10


class UnaskedHalves:
    """The half messages on one broker that RocketMQ has checked in vain.

    The class implements the functions of the broker port that check-back calls.
    """

    def __init__(self, broker: Admin, as_check: AsCheck) -> None:
        self._master = broker.master()
        self._as_check = as_check
        # The copies of each half message, the newest first.
        self._claimed: dict[UUID, list[Sequence[Stored]]] = {}

    def claim_checks(self, producer_group: str, *, limit: int = 500) -> list[Check]:
        """Return one check for each transaction with such half messages. Raises BrokerError."""
        self._claimed, checks = _claim(undecided(self._master, producer_group), limit, self._as_check)
        return checks

    def report_answers(self, producer_group: str, answers: Sequence[Answer]) -> list[EndStatus | None]:
        """Send the decisions to the broker. Raises BrokerError."""
        return [self._end(answer) for answer in answers]

    def _end(self, answer: Answer) -> EndStatus | None:
        if answer.decision is Decision.UNKNOWN:
            return None
        for newest, *others in self._claimed.pop(answer.transaction_id, []):
            if not self._is_taken(newest, answer.decision):
                # The broker is no master any more, or has no such message. The next pass reads the queue again.
                return EndStatus.LEFT_TO_CHECK
            # The broker has stored the decision. A rollback of another copy only ends the checks of this copy.
            for other in others[:_OTHER_COPIES]:
                self._is_taken(other, Decision.ROLLBACK)
        return EndStatus.ACCEPTED

    def _is_taken(self, stored: Stored, decision: Decision) -> bool:
        status, _, _ = self._master.ask(
            _END,
            {
                "topic": stored.topic,
                "producerGroup": stored.properties.get("PGROUP", ""),
                "tranStateTableOffset": stored.offset,
                "commitLogOffset": stored.place,
                "commitOrRollback": _RESOLUTIONS[decision],
                "fromTransactionCheck": True,
                "msgId": stored.message_id,
                "transactionId": stored.message_id,
            },
        )
        return not status


def undecided(broker: Admin, producer_group: str) -> list[tuple[CheckProperties, Sequence[Stored]]]:
    """Return the half messages near the end of the queue that were checked in vain, each with its copies.

    The newest copy is the first one. With each check, RocketMQ stores a half message again, and a decision names one of
    its copies. Raises BrokerError.
    """
    offsets_decided = set(decided_offsets(broker))
    copies: dict[UUID, list[Stored]] = {}
    about: dict[UUID, CheckProperties] = {}
    decided: set[UUID] = set()
    begin = max(broker.stored_offset(CHECKER, HALVES), end_of_queue(broker, HALVES) - _NEWEST_STORED)
    for stored in read_stored(broker, READER, HALVES, begin):
        found = asked_of_group(stored, broker, producer_group)
        if found is None:
            continue
        message_id = found.message.message_id
        if stored.offset in offsets_decided:
            decided.add(message_id)
        elif int(stored.properties.get("TRANSACTION_CHECK_TIMES", 0)) >= _CHECKS:
            copies.setdefault(message_id, []).append(stored)
            about[message_id] = found
    return [(about[one], stored[::-1]) for one, stored in copies.items() if one not in decided]


def asked_of_group(stored: Stored, broker: Admin, producer_group: str) -> CheckProperties | None:
    """Return the check data of a half message; None if another group or another program sent the half message."""
    try:
        found = asked(stored)
    except (ValueError, KeyError, TypeError):
        return None
    is_of_group = found is not None and (found.producer_group, found.namespace) == (producer_group, broker.namespace)
    return found if is_of_group else None


def decided_offsets(broker: Admin) -> Iterator[int]:
    """Yield the offsets of the half messages that RocketMQ has decided lately. Raises BrokerError."""
    for note in read_stored(broker, READER, DECISIONS, broker.stored_offset(CHECKER, DECISIONS)):
        if note.tag == _DECIDED_TAG:
            yield from (int(text) for text in note.body.decode().split(",") if text.strip().isdigit())
