"""The words of the transactional-message protocol: decisions, halves, ends, checks, answers."""

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
    """It committed: its messages are delivered."""
    ROLLBACK = "R"
    """It did not and never will: nobody sees its messages."""
    UNKNOWN = "?"
    """Not known yet: ask again later. Never stored as an outcome."""


class DecidedBy(enum.StrEnum):
    """Who reported a decision."""

    PRODUCER = "P"
    CHECK = "K"
    OPERATOR = "O"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducerEpoch:
    """One instance of a logical producer: of those with the same transactional id, only the newest may send.

    The id stands for itself within its producer group. Kafka's words, but the epoch stands in the broker's database.
    """

    producer_group: str
    transactional_id: str
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfTransaction:
    """The messages of one publish call, to be stored invisibly until the local transaction is decided.

    `transaction_id` is the id of the first message (as in RocketMQ). `producer_group` names the
    interchangeable producers that can answer a check-back; `ledger_id` the table of local transactions
    the answer must come from (None: there is none); `checker` the registered look-up to run, if any.
    `immunity_seconds` is the minimum age before the first check that may write (None: broker default).
    `producer` is the instance that sends it, where the producer has a transactional id: an older one is refused.
    """

    producer_group: str
    messages: Sequence[Message]
    ledger_id: UUID | None = None
    checker: str = ""
    immunity_seconds: int | None = None
    producer: ProducerEpoch | None = None

    @property
    def transaction_id(self) -> UUID:
        """The id of the first message."""
        return self.messages[0].message_id


@dataclass(frozen=True, kw_only=True, slots=True)
class EndTransaction:
    """An end message: the report of a decision."""

    transaction_id: UUID
    decision: Decision
    producer_group: str
    decided_by: DecidedBy = DecidedBy.PRODUCER


class ParkReason(enum.StrEnum):
    """Why an undecided transaction was parked: named in the status, and asked about only now and then."""

    CHECKS = "checks"
    """Its producer group was asked MAX_CHECKS times, and no answer that counts was a decision."""
    UNANSWERED = "unanswered"
    """Past the age limit, and no producer of its group asks for checks: nobody runs that group."""
    AGE = "age"
    """Past the age limit; its group asks, but no answer counted (still running, ledger out of reach or unknown)."""


class EndStatus(enum.StrEnum):
    """What the broker did with an end message."""

    APPLIED = "applied"
    """The first decision for its transaction; it stands."""
    REPEATED = "repeated"
    """The same decision stood already; nothing changed."""
    CONTRADICTED = "contradicted"
    """The other decision stood already; it still stands, and an incident is recorded."""
    REFUSED = "refused"
    """No such half message, or one of another producer group; an incident is recorded."""
    ACCEPTED = "accepted"
    """The engine took it and does not say more: where a decision stood already, that one or this one holds."""
    LEFT_TO_CHECK = "left to check"
    """The engine cannot take it here and now: check-back settles the transaction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A half message the broker asks its producer group about.

    `age_seconds` is measured by the broker's clock. `may_write` is False before immunity ends: then a
    checker only reads. `message` is the first message of the transaction.
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
    """What a checker says about one check.

    `counts` is False when the question could not really be asked (no checker, wrong ledger, the local
    transaction is still running): then no check is used up. `alarm` asks for an incident to be recorded.
    """

    transaction_id: UUID
    decision: Decision
    detail: str = ""
    counts: bool = True
    alarm: bool = False


STILL_RUNNING: Final = "still running"
"""How the detail of an answer begins that found the local transaction open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckCounts:
    """What one check-back pass did."""

    claimed: int = 0
    committed: int = 0
    rolled_back: int = 0
    unknown: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckSettings:
    """When half messages are asked about (design: RocketMQ's defaults, the longer pair where sources differ).

    `immunity_seconds`: minimum age before the first check, unless the half carries its own.
    `recheck_seconds`: wait after an UNKNOWN. So many answers that count and are UNKNOWN (`max_checks`) park it; so does
    the broker's maintenance, whoever answered or did not, `max_age_seconds` after immunity ended. A parked one is asked
    about every `parked_recheck_seconds`, and when its group comes back.
    """

    immunity_seconds: int = 6
    recheck_seconds: float = 60.0
    max_checks: int = 15
    max_age_seconds: float = 72 * 3600.0
    parked_recheck_seconds: float = 3600.0


GROUP_AWAY_SECONDS: Final = 300.0
"""A producer group that has not asked for checks for so long is away. When it comes back, and when a new process of it
starts, its parked transactions are asked about at once, but none more often than this."""
