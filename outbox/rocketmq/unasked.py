"""Decides half messages about which RocketMQ reaches no producer, with the help of the ledger.

In a cluster, RocketMQ's proxy tells the brokers only about producers of topics whose message type is TRANSACTION. A
topic of outbox has the types NORMAL and TRANSACTION by default, so no process gets its checks. Also a promoted replica
has no producers for some seconds. So a worker reads the queue of half messages through the administration ports, and
sends the ledger's decision to the broker itself.

See decision 285.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from outbox.errors import BrokerError
from outbox.rocketmq.admin import Admin, Stored, read_stored
from outbox.rocketmq.exhausted import READER
from outbox.rocketmq.left import CHECKER, HALVES
from outbox.rocketmq.wire import CheckProperties, asked
from outbox.transaction import Answer, Check, Decision, EndStatus

logger = logging.getLogger(__name__)

# RocketMQ notes in this queue which half messages are decided. The body of a note lists offsets in the queue of halves.
DECISIONS: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
_DECIDED_TAG: Final = "d"
_END: Final = 37
_RESOLUTIONS: Final = {Decision.COMMIT: 8, Decision.ROLLBACK: 12}
# After this number of checks without a decision, no producer gets the checks, or its answers are lost.
_CHECKS: Final = 2


class UnaskedHalves:
    """The half messages of one producer group that RocketMQ has checked in vain.

    The class implements the functions of the broker port that check-back calls.
    """

    def __init__(
        self, brokers: Sequence[Admin], producer_group: str, as_check: Callable[[CheckProperties, float], Check]
    ) -> None:
        self._brokers = brokers
        self._group = producer_group
        self._as_check = as_check
        self._claimed: dict[UUID, list[tuple[Admin, Stored]]] = {}

    def claim_checks(self, producer_group: str, *, limit: int = 500) -> list[Check]:
        """Return one check for each transaction with such half messages.

        A broker that does not answer is left out, so that the transactions of the other brokers do not wait for it.
        """
        self._claimed = {}
        found: dict[UUID, CheckProperties] = {}
        for broker in self._brokers:
            try:
                master = broker.master()
                halves = undecided(master, producer_group)
            except BrokerError as error:
                logger.warning("the next pass looks for unanswered checks again: %s", error)
                continue
            for stored, about in halves:
                if about.transaction_id in found or len(found) < limit:
                    found[about.transaction_id] = about
                    self._claimed.setdefault(about.transaction_id, []).append((master, stored))
        now = datetime.now(UTC)
        return [self._as_check(about, (now - about.born_at).total_seconds()) for about in found.values()]

    def report_answers(self, producer_group: str, answers: Sequence[Answer]) -> list[EndStatus | None]:
        """Send the decisions to the brokers. Raises BrokerError."""
        return [self._end(answer) for answer in answers]

    def _end(self, answer: Answer) -> EndStatus | None:
        if answer.decision is Decision.UNKNOWN:
            return None
        for master, stored in self._claimed.pop(answer.transaction_id, []):
            status, _, _ = master.ask(
                _END,
                {
                    "topic": stored.topic,
                    "producerGroup": stored.properties.get("PGROUP", ""),
                    "tranStateTableOffset": stored.offset,
                    "commitLogOffset": stored.place,
                    "commitOrRollback": _RESOLUTIONS[answer.decision],
                    "fromTransactionCheck": True,
                    "msgId": stored.message_id,
                    "transactionId": stored.message_id,
                },
            )
            if status:
                # The broker is no master any more, or has no such message. The next pass reads the queue again.
                return EndStatus.LEFT_TO_CHECK
        return EndStatus.ACCEPTED


def undecided(broker: Admin, producer_group: str) -> list[tuple[Stored, CheckProperties]]:
    """Return the newest copy of each half message that was checked in vain. Raises BrokerError.

    With each check, RocketMQ stores a half message again, and a decision names one of its copies.
    """
    offsets_decided = set(decided_offsets(broker))
    newest: dict[UUID, tuple[Stored, CheckProperties]] = {}
    decided: set[UUID] = set()
    for stored in read_stored(broker, READER, HALVES, broker.stored_offset(CHECKER, HALVES)):
        try:
            about = asked(stored)
        except (ValueError, KeyError, TypeError):
            # Another program sent this half message.
            continue
        if about is None or (about.producer_group, about.namespace) != (producer_group, broker.namespace):
            continue
        if stored.offset in offsets_decided:
            decided.add(about.message.message_id)
        elif int(stored.properties.get("TRANSACTION_CHECK_TIMES", 0)) >= _CHECKS:
            newest[about.message.message_id] = (stored, about)
    return [one for message_id, one in newest.items() if message_id not in decided]


def decided_offsets(broker: Admin) -> Iterator[int]:
    """Yield the offsets of the half messages that RocketMQ has decided lately. Raises BrokerError."""
    for note in read_stored(broker, READER, DECISIONS, broker.stored_offset(CHECKER, DECISIONS)):
        if note.tag == _DECIDED_TAG:
            yield from (int(text) for text in note.body.decode().split(",") if text.strip().isdigit())
