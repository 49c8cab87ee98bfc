"""The types of the protocol for transactional messages: decisions, half messages, end messages, checks, answers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from outbox.message import Message


class Decision(enum.StrEnum):
    """The outcome of a local transaction."""

    COMMIT = "C"
    """The local transaction has committed, so its messages are delivered."""
    ROLLBACK = "R"
    """The local transaction did not commit and cannot commit any more, so its messages are never delivered."""
    UNKNOWN = "?"
    """The outcome is not known yet, so the broker repeats the check. UNKNOWN is never stored as a decision."""


class DecidedBy(enum.StrEnum):
    """The source of a decision."""

    PRODUCER = "P"
    CHECK = "K"
    OPERATOR = "O"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducerEpoch:
    """One instance of a logical producer. Among the instances with the same transactional id, only the newest may send.

    The transactional id is unique within its producer group. The terms `transactional id` and `epoch` come from Kafka.
    The broker's database stores the epoch.
    """

    producer_group: str
    transactional_id: str
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfTransaction:
    """The messages of one publish call, stored invisibly until the local transaction is decided.

    `transaction_id` is the id of the first message (as in RocketMQ). `producer_group` names a group of producers, of
    which each can answer a check. `ledger_id` is the id of the ledger in which a check must look for the answer; it is
    None if the producer keeps no ledger. `immunity_seconds` is the minimum age before the first check that may write.
    If `immunity_seconds` is None, the broker's default applies. If the producer has a transactional id, `producer` is
    the sending instance, so that the broker can refuse an older instance.
    """

    producer_group: str
    messages: Sequence[Message]
    ledger_id: UUID | None = None
    immunity_seconds: int | None = None
    producer: ProducerEpoch | None = None

    @property
    def transaction_id(self) -> UUID:
        """The id of the transaction, which is the id of its first message."""
        return self.messages[0].message_id


@dataclass(frozen=True, kw_only=True, slots=True)
class EndTransaction:
    """An end message: the report of a decision."""

    transaction_id: UUID
    decision: Decision
    producer_group: str
    decided_by: DecidedBy = DecidedBy.PRODUCER


class ParkReason(enum.StrEnum):
    """Why an undecided transaction was parked. The status lists parked transactions, which the broker checks rarely."""

    CHECKS = "checks"
    """The producer group gave `max_checks` answers that count, and no answer was a decision."""
    UNANSWERED = "unanswered"
    """The transaction is past the age limit, and no process of its producer group runs and asks for checks."""
    AGE = "age"
    """The transaction is past the age limit. Its producer group asks for checks, but no answer was a decision."""


class EndStatus(enum.StrEnum):
    """The broker's reply to an end message."""

    APPLIED = "applied"
    """This decision was the first decision of its transaction, and is final."""
    REPEATED = "repeated"
    """The same decision was stored before, so nothing changed."""
    CONTRADICTED = "contradicted"
    """The opposite decision was stored before and is still valid. The broker has recorded an incident."""
    REFUSED = "refused"
    """The half message does not exist, or belongs to another producer group. The broker has recorded an incident."""
    ACCEPTED = "accepted"
    """The engine has accepted the decision, but does not report whether it is the first decision.

    If an earlier decision exists, the earlier decision may be the valid decision.
    """
    LEFT_TO_CHECK = "left to check"
    """The engine cannot accept the decision now, so check-back decides the transaction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A half message about which the broker asks its producer group.

    The broker's clock measures `age_seconds`. Before the immunity ends, `may_write` is False, and a checker only reads.
    `message` is the first message of the transaction.
    """

    transaction_id: UUID
    producer_group: str
    ledger_id: UUID | None
    message: Message
    stored_at: datetime
    age_seconds: float
    checks: int
    may_write: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A checker's answer to one check.

    `counts` is False if the outcome could not be looked up, because the ledger is wrong, or the local transaction still
    runs. Such an answer does not count for `max_checks`. If `alarm` is True, the broker records an incident.
    """

    transaction_id: UUID
    decision: Decision
    detail: str = ""
    counts: bool = True
    alarm: bool = False


STILL_RUNNING: Final = "still running"
"""If a checker finds the local transaction open, the detail of its answer begins with this text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckCounts:
    """The counts of one check-back pass."""

    claimed: int = 0
    committed: int = 0
    rolled_back: int = 0
    unknown: int = 0

    def __add__(self, other: CheckCounts) -> CheckCounts:
        return CheckCounts(
            claimed=self.claimed + other.claimed,
            committed=self.committed + other.committed,
            rolled_back=self.rolled_back + other.rolled_back,
            unknown=self.unknown + other.unknown,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckSettings:
    """The limits of checking half messages.

    The defaults are those of RocketMQ. If RocketMQ's source code has two values for a limit, the default is the longer
    value. If a half message has no minimum age of its own, `immunity_seconds` is the minimum age before its first
    check. `recheck_seconds` is the wait after the answer UNKNOWN. After `max_checks` answers UNKNOWN that count, the
    broker parks the transaction. If a transaction is still undecided `max_age_seconds` after the end of its immunity,
    the broker parks this transaction even without an answer. A parked transaction is checked every
    `parked_recheck_seconds`, and when its producer group asks for checks again after an absence.
    """

    immunity_seconds: int = 6
    recheck_seconds: float = 60.0
    max_checks: int = 15
    max_age_seconds: float = 72 * 3600.0
    parked_recheck_seconds: float = 3600.0


GROUP_AWAY_SECONDS: Final = 300.0
"""If a producer group asks for no checks during this number of seconds, the group counts as away.

When a process of the group starts, or asks for checks again after the group was away, the parked transactions of the
group are checked at once. A parked transaction is left out if its last check was less than GROUP_AWAY_SECONDS ago.
"""
