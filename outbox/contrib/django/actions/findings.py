"""The actions on saved findings of the reconciliation: do the step of the repair plan; forget a saved result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.db import router, transaction

from outbox.contrib.django.actions.declaration import ActionField, ActionPlan, DeclaredAction, FieldKind, Values
from outbox.contrib.django.models import Finding, SavedReconciliation
from outbox.contrib.django.operations import additions
from outbox.errors import UsageError


def _repair(values: Values) -> ActionPlan:
    # The package of repairs uses the actions on dead letters and transactions, so this module cannot import it.
    plan: ActionPlan = additions.plans["repair"](values)
    return plan


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


ACTIONS: Final = (
    DeclaredAction(
        name="repair",
        title="Repair a finding",
        command="outbox_finding repair",
        fields=(
            ActionField(
                name="finding",
                kind=FieldKind.COUNT,
                required=True,
                positional=True,
                help="the number of the finding, as `outbox_finding list` shows it",
            ),
        ),
        plan=_repair,
    ),
    DeclaredAction(
        name="forget_findings",
        title="Forget a saved reconciliation",
        command="outbox_finding forget",
        fields=(
            ActionField(name="output", required=True, positional=True, help="the output folder of the reconciliation"),
        ),
        plan=_forget,
    ),
)
