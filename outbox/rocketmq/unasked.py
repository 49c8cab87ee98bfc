"""Decides half messages about which RocketMQ reaches no producer, with the help of the ledger.

In a cluster, RocketMQ's proxy tells the brokers only about producers of topics whose message type is TRANSACTION. A
topic of outbox has the types NORMAL and TRANSACTION by default, so no process gets its checks. Also a promoted replica
has no producers for some seconds. So a worker reads the queue of half messages through the administration ports, and
sends the ledger's decision to the broker itself.

RocketMQ stores a half message again with each check, and a promotion multiplies these copies: one broker had 100,000 of
2,103 half messages. So the pass reads the newest 20,000 entries of each queue, decides the newest copy, and then rolls
back up to ten others. This loses nothing: the log has the published message before the rollbacks, and a replica copies
the log in its order. The message type TRANSACTION for all topics was rejected: programs of other teams could not send
to such a topic, and a message outside of a transaction would need two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from outbox.rocketmq.admin import CHECKER, HALVES, Admin, Stored, end_of_queue, read_stored
from outbox.rocketmq.exhausted import READER
from outbox.rocketmq.wire import CheckProperties, asked
from outbox.transaction import Answer, Check, Decision, EndStatus

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


@dataclass(frozen=True, slots=True)
class Undecided:
    """A half message that was checked in vain: its copies on one broker, the newest first."""

    copies: Sequence[Stored]
    about: CheckProperties


class UnaskedHalves:
    """The half messages on one broker that RocketMQ has checked in vain.

    The class implements the functions of the broker port that check-back calls.
    """

    def __init__(self, broker: Admin, as_check: Callable[[CheckProperties, float], Check]) -> None:
        self._master = broker.master()
        self._as_check = as_check
        self._claimed: dict[UUID, list[Undecided]] = {}

    def claim_checks(self, producer_group: str, *, limit: int = 500) -> list[Check]:
        """Return one check for each transaction with such half messages. Raises BrokerError."""
        self._claimed = {}
        for one in undecided(self._master, producer_group):
            if one.about.transaction_id in self._claimed or len(self._claimed) < limit:
                self._claimed.setdefault(one.about.transaction_id, []).append(one)
        now = datetime.now(UTC)
        found = [halves[0].about for halves in self._claimed.values()]
        return [self._as_check(about, (now - about.born_at).total_seconds()) for about in found]

    def report_answers(self, producer_group: str, answers: Sequence[Answer]) -> list[EndStatus | None]:
        """Send the decisions to the broker. Raises BrokerError."""
        return [self._end(answer) for answer in answers]

    def _end(self, answer: Answer) -> EndStatus | None:
        if answer.decision is Decision.UNKNOWN:
            return None
        for half in self._claimed.pop(answer.transaction_id, []):
            newest, *others = half.copies
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


def undecided(broker: Admin, producer_group: str) -> list[Undecided]:
    """Return the half messages near the end of the queue that were checked in vain. Raises BrokerError.

    With each check, RocketMQ stores a half message again, and a decision names one of its copies.
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
    return [Undecided(stored[::-1], about[one]) for one, stored in copies.items() if one not in decided]


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
