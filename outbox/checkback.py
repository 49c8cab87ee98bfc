"""Check-back: asks the application for the outcome of half messages for which no decision was reported."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from outbox import tracing
from outbox.ports import Broker, Checker
from outbox.transaction import Answer, Check, CheckCounts, Decision, EndStatus
from outbox.utils import measures
from outbox.utils.safe_text import error_line, printable

logger = logging.getLogger(__name__)

_REPORT_EVERY = 100
_TAKEN = (EndStatus.APPLIED, EndStatus.ACCEPTED)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The checks of one batch, and the time at which the checker was asked."""

    checks: Mapping[UUID, Check]
    at_ns: int


class CheckBack:
    """Runs check-back for one producer group. Any number of `CheckBack` objects may work for a group at once."""

    def __init__(self, broker: Broker, producer_group: str, checker: Checker, *, batch: int = 500) -> None:
        self._broker = broker
        self._group = producer_group
        self._checker = checker
        self._batch = batch

    def run_once(self, *, max_batches: int = 100) -> CheckCounts:
        """Claim and answer due checks, up to `max_batches` batches of `batch` checks. Return the counts."""
        total = CheckCounts()
        for _ in range(max_batches):
            checks = self._broker.claim_checks(self._group, limit=self._batch)
            if not checks:
                break
            total += self._answer(checks)
        if measures.recorder is not None:
            measures.recorder.checked(self._group, total)
        return total

    def _answer(self, checks: Sequence[Check]) -> CheckCounts:
        total = CheckCounts(claimed=len(checks))
        asked = _Asked({check.transaction_id: check for check in checks}, time.time_ns())
        pending: list[Answer] = []
        for answer in _ask(self._checker, checks):
            pending.append(answer)
            if len(pending) >= _REPORT_EVERY:
                total += self._report(pending, asked)
                pending = []
        return total + self._report(pending, asked) if pending else total

    def _report(self, answers: Sequence[Answer], asked: _Asked) -> CheckCounts:
        statuses = self._broker.report_answers(self._group, answers)
        if tracing.tracer is not None:
            for answer, status in zip(answers, statuses, strict=True):
                check = asked.checks[answer.transaction_id]
                tracing.tracer.answered(check, answer, status, asked_at_ns=asked.at_ns)
        applied = [a.decision for a, status in zip(answers, statuses, strict=True) if status in _TAKEN]
        return CheckCounts(
            committed=applied.count(Decision.COMMIT),
            rolled_back=applied.count(Decision.ROLLBACK),
            unknown=sum(answer.decision is Decision.UNKNOWN for answer in answers),
        )


def _ask(checker: Checker, checks: Sequence[Check]) -> Iterator[Answer]:
    """Yield exactly one answer per check, even if the checker fails or omits checks."""
    open_checks = {check.transaction_id for check in checks}
    problem = "the checker gave no answer"
    try:
        for answer in checker.check_local_transactions(checks):
            if answer.transaction_id in open_checks:
                open_checks.discard(answer.transaction_id)
                yield answer
    except Exception as error:
        logger.error(
            "the checker failed; %d half messages stay undecided and are checked again later",
            len(open_checks),
            exc_info=printable(error),
        )
        problem = f"the checker raised {error_line(error)}"
    for transaction_id in open_checks:
        yield Answer(transaction_id=transaction_id, decision=Decision.UNKNOWN, detail=problem)
