"""Decides the transactions that RocketMQ gave up, with the help of the ledger, and publishes committed messages again.

After `transactionCheckMax` checks (15), or after `fileReservedTime` (72 h), the broker moves an undecided half message
to the system topic TRANS_CHECK_MAX_TIME_TOPIC and sends no more checks. On each broker, this system topic has one
queue, which all services share.

The ledger has no bodies, so the pass reads this topic through the administration ports; the proxy lets no client read
it. The pass moves its stored offset only past transactions that it has decided. Two workers, or a worker that crashes
before it stores the offset, may publish a message twice; the inbox skips the second copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from outbox.errors import BrokerError, OutboxError
from outbox.message import Message
from outbox.rocketmq.admin import Admin, end_of_queue, read_stored
from outbox.rocketmq.declarations import wire_name
from outbox.rocketmq.wire import CheckProperties, asked
from outbox.transaction import Answer, Check, Decision, EndStatus
from outbox.utils.safe_text import printable, shown_text

logger = logging.getLogger(__name__)

TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
# Every broker has this consumer group. A request to read messages must contain the name of a group, but does not change
# the group.
READER: Final = "TOOLS_CONSUMER"


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
        as_check: Callable[[CheckProperties, float], Check],
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
        self._claimed = {}
        for one in self._progress:
            try:
                unsettled = list(self._unsettled(one, producer_group))
            except BrokerError as error:
                logger.warning("the next pass looks for given-up checks again: %s", shown_text(error))
                continue
            for offset, about in unsettled:
                if about.transaction_id in self._claimed or len(self._claimed) < limit:
                    self._claimed.setdefault(about.transaction_id, []).append((one, offset, about))
        now = datetime.now(UTC)
        found = [waiting[0][2] for waiting in self._claimed.values()]
        return [self._as_check(about, (now - about.born_at).total_seconds()) for about in found]

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
