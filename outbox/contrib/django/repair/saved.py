"""Plans the repair of one saved finding, for the action `repair`: the same step as in a plan file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.db import connections

from outbox.contrib.django.actions.declaration import ActionPlan
from outbox.contrib.django.models import Finding, SavedReconciliation
from outbox.contrib.django.repair.actions import PublishSources, StepOutcome, run_step
from outbox.contrib.django.repair.plan import RepairAction, RepairStep, source_of, step_of
from outbox.contrib.django.settings.conf import get_settings, imported
from outbox.errors import UsageError

_FOR_PEOPLE: Final = (StepOutcome.REFUSED, StepOutcome.REPORTED)


def plan(values: Mapping[str, Any]) -> ActionPlan:
    """Verify the step of a saved finding, and return the plan that does it. Raises UsageError."""
    finding = Finding.objects.filter(pk=values["finding"]).first()
    if finding is None:
        raise UsageError(
            f"there is no saved finding {values['finding']}: a later run may have replaced it. `outbox_finding list` "
            "shows the present ones."
        )
    step, config = _step(finding)
    result = run_step(step, config, dry_run=True)

    def do() -> Mapping[str, Any]:
        done = run_step(step, config, dry_run=False)
        if done.outcome in _FOR_PEOPLE:
            raise UsageError(done.detail)
        return {"outcome": done.outcome.value, "detail": done.detail, **done.after}

    is_settled = result.outcome is StepOutcome.SETTLED
    return ActionPlan(
        subject=subject_of(step),
        effect=f"The finding is settled: {result.detail}." if is_settled else f"Repair: {result.detail}.",
        before={"run": finding.run, "step": step.step, **result.before},
        nothing=is_settled,
        refusal=result.detail if result.outcome in _FOR_PEOPLE else "",
        do=do,
    )


def subject_of(step: RepairStep) -> str:
    """The finding of a step, as the audit names it."""
    return f"{step.finding_class} {step.rule}, key {step.key}" + (f", group {step.group}" if step.group else "")


def _step(finding: Finding) -> tuple[RepairStep, PublishSources]:
    saved = SavedReconciliation.objects.filter(output=finding.output).first()
    if finding.step is None or saved is None:
        raise UsageError(
            f"finding {finding.pk} has no step of a plan: an older release saved it, or its key has a NUL character. "
            "Save the result again with `outbox_reconcile --save`, or write a plan with --plan."
        )
    sources = {name: source_of(item) for name, item in saved.plan["rules"].items()}
    step = step_of(finding.step, sources)
    if step.action is not RepairAction.PUBLISH:
        return step, PublishSources(sources=sources, aliases={}, publishers={})
    source = sources[step.rule]
    needed = {source.database, *(effects.database for effects in source.effects)}
    aliases = {name: saved.plan["databases"].get(name, name) for name in needed}
    for name, alias in aliases.items():
        if alias not in connections or connections[alias].vendor != "postgresql":
            raise UsageError(
                f"the rules' database {name!r} is not a PostgreSQL alias of this project. Run `outbox_reconcile --save "
                f"--database {name}=ALIAS`, which also records the alias for repairs."
            )
    paths = get_settings().repair_publishers
    publishers = {rule: imported(f"OUTBOX['REPAIR_PUBLISHERS'][{rule!r}]", path) for rule, path in paths.items()}
    return step, PublishSources(sources=sources, aliases=aliases, publishers=publishers)
