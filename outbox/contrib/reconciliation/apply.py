"""Applies a repair plan step by step, within a limit and a rate.

The audit stores the evidence before and after each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from outbox.contrib.django.actions.audit import recorded_command
from outbox.contrib.reconciliation.plan import RepairAction, RepairPlan, RepairStep
from outbox.contrib.reconciliation.steps import PublishSources, Result, StepOutcome, planned, run_step
from outbox.errors import UsageError
from outbox.utils.faults import point


def turns(
    per_second: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Yield when the next call may start. After a pause of the caller, calls do not start faster to catch up."""
    following = clock()
    while True:
        if (pause := following - clock()) > 0:
            wait(pause)
        following = max(following, clock()) + 1 / per_second
        yield


def apply(
    plan: RepairPlan,
    config: PublishSources,
    *,
    most: int,
    per_second: float,
    reason: str | None,
) -> Iterator[tuple[RepairStep, Result]]:
    """Yield each step with its result as soon as the step has ended.

    At most `most` steps have an effect, and at most `per_second` steps are verified in a second. Without a `reason`,
    the function only verifies steps. If the broker or a database cannot be reached, raises the error of the connection.
    Even then, the audit contains all steps that were done before the error.
    """
    pace = turns(per_second)
    acted = 0
    for step in plan.steps:
        if step.action is RepairAction.REPORT:
            yield step, run_step(step, config, dry_run=True)
            continue
        if acted >= most:
            yield step, Result(StepOutcome.LEFT, f"--most {most} was reached")
            continue
        next(pace)
        result = run_step(step, config, dry_run=True)
        if reason is not None and result.outcome is StepOutcome.WOULD_BE_DONE:
            result = _done(plan, step, config, result, reason)
        acted += result.outcome in (StepOutcome.DONE, StepOutcome.WOULD_BE_DONE)
        yield step, result


def _done(plan: RepairPlan, step: RepairStep, config: PublishSources, verified: Result, reason: str) -> Result:
    """Do a verified step, and record it in the audit."""
    action = planned(step, config, verified, {"plan": plan.digest})
    entry, failure = recorded_command("repair", action, why=reason)
    point("repair.after_outcome")
    if isinstance(failure, UsageError):
        return Result(StepOutcome.REFUSED, str(failure), verified.before)
    if failure is not None:
        raise failure
    after = dict(entry.after)
    return Result(StepOutcome(after.pop("outcome")), after.pop("detail"), verified.before, after)
