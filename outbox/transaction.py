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
    """The local transaction did not commit and never will, so its messages are never delivered."""
    UNKNOWN = "?"
    """The outcome is not known yet, so the broker asks again later. It is never stored as an outcome."""


class DecidedBy(enum.StrEnum):
    """The source of a decision."""

    PRODUCER = "P"
    CHECK = "K"
    OPERATOR = "O"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducerEpoch:
    """One instance of a logical producer. Of the instances with one transactional id, only the newest may send.

    The transactional id is unique within its producer group. The terms are Kafka's, but here the broker's database
    stores the epoch.
    """

    producer_group: str
    transactional_id: str
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfTransaction:
    """The messages of one publish call, stored invisibly until the local transaction is decided.

    `transaction_id` is the id of the first message (as in RocketMQ). `producer_group` names a group of producers, and
    each of them can answer a check-back. `ledger_id` names the ledger that the answer must come from; if it is None,
    there is no ledger. `checker` names the registered look-up to run, if any. `immunity_seconds` is the minimum age
    before the first check that may write; if it is None, the broker's default applies. `producer` is the sending
    instance if the producer has a transactional id, because the broker refuses an older instance.
    """

    producer_group: str
    messages: Sequence[Message]
    ledger_id: UUID | None = None
    checker: str = ""
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
    """Why an undecided transaction was parked. The status lists parked transactions. The broker checks them rarely."""

    CHECKS = "checks"
    """The producer group gave MAX_CHECKS answers that count, and none of them was a decision."""
    UNANSWERED = "unanswered"
    """The transaction is past the age limit, and no process of its producer group asks for checks: none is running."""
    AGE = "age"
    """The transaction is past the age limit. Its group asks for checks, but no answer was a decision."""


class EndStatus(enum.StrEnum):
    """The broker's reply to an end message."""

    APPLIED = "applied"
    """This was the first decision for its transaction, and it is final."""
    REPEATED = "repeated"
    """The same decision was stored before; nothing changed."""
    CONTRADICTED = "contradicted"
    """The opposite decision was stored before and stays; an incident is recorded."""
    REFUSED = "refused"
    """There is no such half message, or it belongs to another producer group; an incident is recorded."""
    ACCEPTED = "accepted"
    """The engine has accepted the decision and reports nothing further.

    If an earlier decision exists, the earlier decision may be the valid one.
    """
    LEFT_TO_CHECK = "left to check"
    """The engine cannot take the decision now, so check-back settles the transaction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A half message about which the broker asks its producer group.

    The broker's clock measures `age_seconds`. `may_write` is False until immunity ends; until then a checker only
    reads. `message` is the first message of the transaction.
    """

    transaction_id: UUID
    producer_group: str
    ledger_id: UUID | None
    checker: str
    message: Message
    stored_at: datetime
    age_seconds: float
    checks: int
    may_write: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A checker's answer to one check.

    `counts` is False if the outcome could not be looked up: there is no checker, the ledger is the wrong one, or the
    local transaction still runs. Such an answer does not use up a check. `alarm` asks the broker to record an incident.
    """

    transaction_id: UUID
    decision: Decision
    detail: str = ""
    counts: bool = True
    alarm: bool = False


STILL_RUNNING: Final = "still running"
"""The detail of an answer begins with this text if the local transaction was found open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckCounts:
    """The counts of one check-back pass."""

    claimed: int = 0
    committed: int = 0
    rolled_back: int = 0
    unknown: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckSettings:
    """The limits of checking half messages.

    Defaults are RocketMQ's; if its sources give two values, the longer is used. `immunity_seconds`: the minimum age
    before the first check, if the half message has no minimum age of its own. `recheck_seconds`: the wait after an
    UNKNOWN. `max_checks`: after this number of UNKNOWN answers that count, the broker parks the transaction.
    `max_age_seconds`: this long after immunity has ended, the broker's maintenance parks the transaction, even if no
    answer came. A parked transaction is checked every `parked_recheck_seconds`, and when its producer group asks for
    checks again after an absence.
    """

    immunity_seconds: int = 6
    recheck_seconds: float = 60.0
    max_checks: int = 15
    max_age_seconds: float = 72 * 3600.0
    parked_recheck_seconds: float = 3600.0


GROUP_AWAY_SECONDS: Final = 300.0
"""If a producer group has not asked for checks for this number of seconds, it counts as away.

When the group returns, or when one of its processes starts, its parked transactions are checked at once. This happens
at most once in this interval.
"""
