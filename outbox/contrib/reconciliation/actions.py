"""Actions on saved findings of the reconciliation (repair one, forget a saved result), and the list of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from django.db import router, transaction
from django.db.models import Count

from outbox.contrib.django.actions.declaration import ActionPlan, Button, Field, FieldKind, Values, action, argument
from outbox.contrib.django.actions.listing import Asked, Column, Listing
from outbox.contrib.django.settings.conf import imported, settings_of
from outbox.contrib.reconciliation.findings import MAX_SAVED
from outbox.contrib.reconciliation.models import Finding, SavedReconciliation
from outbox.contrib.reconciliation.plan import RepairAction, RepairStep, source_of, step_of
from outbox.contrib.reconciliation.settings import ReconciliationSettings
from outbox.contrib.reconciliation.steps import PublishSources, planned, run_step, sources_of
from outbox.errors import UsageError


@action(
    "repair",
    "Repair a finding",
    "outbox_finding repair",
    argument("finding", "the number of the finding, as `outbox_finding list` shows it", FieldKind.COUNT),
    buttons={"finding": lambda one: [Button("Repair …", "good", {"finding": one.pk})]},
)
def _repair(values: Values) -> ActionPlan:
    finding = Finding.objects.filter(pk=values["finding"]).first()
    if finding is None:
        raise UsageError(
            f"there is no saved finding {values['finding']}: a later run may have replaced it. `outbox_finding list` "
            "shows the present ones."
        )
    step, config = _step(finding)
    return planned(step, config, run_step(step, config, dry_run=True), {"run": finding.run})


def _step(finding: Finding) -> tuple[RepairStep, PublishSources]:
    saved = SavedReconciliation.objects.filter(output=finding.output).first()
    if finding.step is None or saved is None:
        raise UsageError(
            f"finding {finding.pk} has no step of a plan: an older release saved it, or its key has a NUL character. "
            "Save the result again with `outbox_reconcile --save`, or write a plan with --plan."
        )
    sources = {name: source_of(item) for name, item in saved.plan["rules"].items()}
    step = step_of(finding.step, sources)
    paths = settings_of(ReconciliationSettings).repair_publishers if step.action is RepairAction.PUBLISH else {}
    publishers = {rule: imported(f"OUTBOX['REPAIR_PUBLISHERS'][{rule!r}]", path) for rule, path in paths.items()}
    how = "run `outbox_reconcile --save --database {name}=ALIAS`, which also records the alias for repairs."
    return step, sources_of([step], sources, saved.plan["databases"], publishers, how=how)


@action(
    "forget_findings",
    "Forget a saved reconciliation",
    "outbox_finding forget",
    argument("output", "the output folder of the reconciliation"),
    buttons={"saved reconciliation": lambda one: [Button("Forget …", fields={"output": one.output})]},
)
def _forget(values: Values) -> ActionPlan:
    output = values["output"]
    saved = SavedReconciliation.objects.filter(output=output).first()
    if saved is None:
        known = ", ".join(SavedReconciliation.objects.order_by("output").values_list("output", flat=True))
        raise UsageError(f"no result of the folder {output!r} is saved. Saved folders: {known or 'none'}.")
    count = Finding.objects.filter(output=output).count()

    def do() -> Mapping[str, Any]:
        with transaction.atomic(using=router.db_for_write(Finding)):
            Finding.objects.filter(output=output).delete()
            SavedReconciliation.objects.filter(output=output).delete()
        return {"findings": 0}

    return ActionPlan(
        subject=f"reconciliation {output}",
        effect=f"Forget the saved result of {output} with its {count} findings. The folder itself stays as it is.",
        before={"run": saved.run, "findings": count},
        do=do,
    )


# -- the list -------------------------------------------------------------------------------------------

# The meaning of each class of findings, and the next step.
CLASSES: Final[Mapping[str, tuple[str, str]]] = {
    "LOST": (
        "A business row has no message, so no subscriber knows about the row.",
        "Find the code that writes the row without publishing, and correct the code. Publish a message for the row "
        "with `outbox-reconcile plan` and `outbox_repair`, unless groups have acted on the row: they would act twice.",
    ),
    "ORPHAN": (
        "A committed message or an effect has no business row.",
        "The message's page shows how its transaction was decided. Restore the row, or undo the effects of the groups.",
    ),
    "HALF_STUCK": (
        "A half message has been undecided for too long.",
        "The message's page shows why check-back found no answer. If the row exists, commit the transaction, else roll "
        "it back.",
    ),
    "DEAD": (
        "The message is a dead letter of a consumer group.",
        "Correct the handler, then replay the dead letter.",
    ),
    "UNDELIVERED": (
        "A consumer group shows no effect within its limit.",
        "The group's page shows whether the group runs, waits or is stopped. If the group passed the message without "
        "an effect, deliver the message to the group again (`outbox_message redeliver`).",
    ),
    "DUPLICATE": (
        "There are more messages than rows, several rows with one key, or more effects than messages.",
        "Undo the surplus effect. Look for a retry that publishes outside of the transaction of its row.",
    ),
    "MISMATCH": (
        "The business row and the message body differ.",
        "Publish the row's state as a new message if subscribers need it, or correct the row.",
    ),
    "WRONG_EFFECT": (
        "An effect has another value than its message.",
        "Correct the handler, and correct the effect; or remove it and deliver the message again to the group.",
    ),
    "WRONG_SUM": (
        "The effects of a message do not add up to its value.",
        "Write the missing part, or undo the surplus part.",
    ),
    "EARLY": (
        "An effect is older than its business row, or than the time for which its message was delayed.",
        "Correct the row's time if it is wrong; if only the clocks differ, raise the rule's grace. Otherwise undo the "
        "effect, and deliver the message again to the group.",
    ),
    "UNREADABLE": (
        "The body of a committed message cannot be read as declared.",
        "If the message is right, correct the rule. Otherwise correct the publisher, and publish the row again.",
    ),
    "LATE": (
        "The message or the effect exists, but it is later than the limit that the rule declares.",
        "Nothing is missing: correct the row's time if it is wrong, else acknowledge the finding.",
    ),
    "RECOVERED": ("The difference that the previous run found does not exist any more.", "Nothing to do."),
    "EXPIRED": (
        "A finding of an earlier run can no longer be judged.",
        "Look at the business rows to settle the finding. If findings stay open for longer than the topic's retention, "
        "raise the retention.",
    ),
}


def _read(run: None, asked: Asked) -> list[Finding]:
    given = {"output": asked["output"], "finding_class": asked["class"], "id__gt": asked["after"]}
    found = Finding.objects.order_by("id").filter(**{name: one for name, one in given.items() if one is not None})
    return list(found[: asked.limit])


def _notes(run: None, asked: Asked, rows: Sequence[Finding]) -> Mapping[str, object]:
    counted = Finding.objects.values("output").annotate(findings=Count("pk")).filter(findings__gte=MAX_SAVED)
    return {
        "cut": [one["output"] for one in counted],
        "saved": list(SavedReconciliation.objects.defer("plan").order_by("output")),
        "most": MAX_SAVED,
        "classes": CLASSES,
        "causes": _by_cause(rows),
    }


def _by_cause(rows: Sequence[Finding]) -> list[list[Finding]]:
    """Put the findings together that probably have one cause: those of one result, class, severity, rule and group."""
    found: dict[tuple[object, ...], list[Finding]] = {}
    for one in rows:
        found.setdefault((one.output, one.finding_class, one.severity, one.rule, one.group), []).append(one)
    return list(found.values())


def action_of(finding: Finding) -> str:
    """The action of the finding's step: publish, replay or ask; else report."""
    return "report" if finding.step is None else str(finding.step["action"])


def _as_json(one: Finding) -> Mapping[str, object]:
    names = ("output", "run", "rule", "group", "severity", "key", "detail", "message_id", "transaction_id")
    named = {name: getattr(one, name) for name in names}
    return {"finding": one.pk, "class": one.finding_class, **named, "step": action_of(one)}


FINDINGS: Final = Listing(
    "findings",
    (
        Column("finding", "pk"),
        Column("class", "finding_class"),
        *(Column(name, name) for name in ("rule", "key", "group")),
        Column("step", action_of),
        Column("detail", "detail"),
    ),
    _read,
    of_broker=False,
    command="outbox_finding list",
    help="list the saved findings",
    fields=(
        Field("output", "only the findings of this output folder", label="Output folder"),
        Field("class", "only the findings of this class", choices=tuple(CLASSES)),
    ),
    after=Field("after", "list the findings after the finding with this number", FieldKind.NUMBER),
    position=lambda one: one.pk,
    json=_as_json,
    address="findings/",
    title="Findings of reconciliation",
    menu=("Repair", "Findings"),
    empty="No findings are saved. `manage.py outbox_reconcile --save` saves those of a reconciliation.",
    notes=_notes,
    template="findings",
)
