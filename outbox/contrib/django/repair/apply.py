"""Applies a whole plan, step by step, within a limit and a rate, and audits each step before and after."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from outbox.contrib.django.repair.actions import PublishSources, Result, StepOutcome, take
from outbox.contrib.django.repair.audit import RepairLog
from outbox.contrib.django.repair.plan import RepairAction, RepairPlan, RepairStep
from outbox.utils.faults import point


@dataclass(frozen=True, slots=True)
class ApplyLimits:
    """The limits: steps with an effect in total, and per second."""

    most: int
    per_second: float


class RateLimiter:
    """Spaces calls evenly: `turn` returns when the next may start. Tests pass clock and waiting."""

    def __init__(
        self,
        per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._every, self._clock, self._wait = 1 / per_second, clock, wait
        self._next = clock()

    def turn(self) -> None:
        """Wait for the next slot; unused slots are not saved."""
        pause = self._next - self._clock()
        if pause > 0:
            self._wait(pause)
        self._next = max(self._next, self._clock()) + self._every


def apply(
    plan: RepairPlan,
    means: PublishSources,
    limits: ApplyLimits,
    audit: RepairLog | None,
    pace: RateLimiter | None = None,
) -> Iterator[tuple[RepairStep, Result]]:
    """Yield each step with its result when it ends. Without `audit` steps are only verified.

    Raises BrokerError or a database's error if one cannot be reached; the audit has all steps done until then.
    """
    pace = pace or RateLimiter(limits.per_second)
    acted = 0
    for step in plan.steps:
        if step.action is RepairAction.REPORT:
            yield step, take(step, means, intend=_nothing, dry_run=True)
            continue
        if acted >= limits.most:
            yield step, Result(StepOutcome.LEFT, f"--most {limits.most} was reached")
            continue
        pace.turn()
        result = _taken(step, means, audit)
        acted += result.outcome in (StepOutcome.DONE, StepOutcome.WOULD_BE_DONE)
        yield step, result


def _taken(step: RepairStep, means: PublishSources, audit: RepairLog | None) -> Result:
    if audit is None:
        return take(step, means, intend=_nothing, dry_run=True)

    def intend(detail: str, before: Mapping[str, Any]) -> None:
        audit.write(event="intent", **_named(step), detail=detail, before=dict(before))
        point("repair.after_intent")

    with _failure_written(step, audit):
        result = take(step, means, intend=intend, dry_run=False)
    audit.write(
        event="outcome",
        **_named(step),
        outcome=result.outcome.value,
        detail=result.detail,
        before=dict(result.before),
        after=dict(result.after),
    )
    point("repair.after_outcome")
    return result


@contextmanager
def _failure_written(step: RepairStep, audit: RepairLog) -> Iterator[None]:
    """Record an error that ends the run, too. Running the plan again shows whether the step had an effect."""
    try:
        yield
    except Exception as error:
        audit.write(event="error", **_named(step), detail=f"{type(error).__name__}: {error}")
        raise


def _named(step: RepairStep) -> dict[str, str]:
    return {
        "step": step.step,
        "action": step.action.value,
        "rule": step.rule,
        "key": step.key,
        "group": step.group,
        "class": step.finding_class,
    }


def _nothing(detail: str, before: Mapping[str, Any]) -> None:
    """Without an action there is no record."""
