"""The in-memory broker's check-back: claims due checks, applies answers, parks transactions.

Callers hold the log's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from outbox.memory.log import Log, Transaction
from outbox.transaction import GROUP_AWAY_SECONDS, Answer, Check, CheckSettings, ParkReason


class CheckBackSide:
    """The undecided transactions of a log, with the bundled broker's rules (outbox/broker/transaction)."""

    def __init__(
        self, log: Log, settings: CheckSettings, *, now: Callable[[], datetime], report: Callable[[str], None]
    ) -> None:
        self._log = log
        self._settings = settings
        self._now = now
        self._report = report
        self._seen_at: dict[str, datetime] = {}

    def first_due(self, immunity_seconds: int | None) -> datetime:
        """When the immunity of a half message stored now ends."""
        immunity = self._settings.immunity_seconds if immunity_seconds is None else immunity_seconds
        return self._in(immunity)

    def hint(self, transaction_ids: Sequence[UUID]) -> None:
        """Make the transactions due for a check now."""
        for transaction in map(self._log.find, transaction_ids):
            if transaction is not None and transaction.due_at is not None:
                transaction.due_at = min(transaction.due_at, self._now())

    def claim(self, producer_group: str, limit: int) -> list[Check]:
        """Claim the group's due transactions, parked ones last. If the group was away, its parked ones are due."""
        if self._is_away(producer_group):
            self.ask_parked(producer_group, lately_seconds=GROUP_AWAY_SECONDS)
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

    def ask_parked(self, producer_group: str, *, lately_seconds: float = 0.0) -> int:
        """Make the group's parked transactions due now, except those checked recently; returns their number."""
        not_since = self._in(-lately_seconds)
        parked = [t for t in self._of(producer_group) if t.parked is not None]
        chosen = [t for t in parked if not lately_seconds or t.asked_at is None or t.asked_at < not_since]
        for transaction in chosen:
            transaction.due_at = self._now()
        return len(chosen)

    def postpone(self, transaction: Transaction, answer: Answer) -> None:
        """Count an UNKNOWN answer, and park the transaction at the limit."""
        transaction.checks += answer.counts and self._now() >= transaction.immune_until
        if transaction.parked is None and transaction.checks >= self._settings.max_checks:
            self._park(transaction, ParkReason.CHECKS, self._in(self._settings.parked_recheck_seconds))

    def park_overdue(self) -> None:
        """Park the transactions past the age limit, with or without answers, as maintenance does."""
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
        # A topic with on_park='release' lets later messages of the key pass a parked one.
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
            checker=half.checker,
            message=half.messages[0],
            stored_at=transaction.stored_at,
            age_seconds=(self._now() - transaction.stored_at).total_seconds(),
            checks=transaction.checks,
            may_write=self._now() >= transaction.immune_until,
        )
