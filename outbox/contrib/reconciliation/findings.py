"""Stores the result of the reconciliation in two tables, which the operations page and the conditions read.

Each saved finding has its step of the repair plan, so a repair from the page needs no plan file on its machine. The
condition ends with the next saved result and not with the repair, which may not have mended everything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from django.db import models, router, transaction

from outbox.broker.operations.conditions import Concern, Declarations, Judged, Place, Severity, Shown, Symptom
from outbox.broker.operations.state import BrokerState
from outbox.contrib.django.settings.conf import for_column
from outbox.contrib.reconciliation.models import Finding, SavedReconciliation
from outbox.utils.safe_text import storable

CONDITIONS: Final = Declarations[BrokerState]()
MAX_SAVED: Final = 10_000
_BATCH: Final = 1_000
# A condition lists this many causes, and a result may have one cause per rule, class, group and column.
_CAUSES: Final = 20
_NAMES: Final = ("rule", "class", "group", "key", "message_id")
# A finding of the severity `info` is on the page, and raises no condition.
_SEVERITIES: Final = {"critical": Severity.CRITICAL, "warning": Severity.WARNING}


def replace(output: str, lines: Iterable[str], plan: Sequence[str], databases: Mapping[str, str]) -> int:
    """Replace what is saved of this `output`; return the number of findings.

    `lines` are the findings, one JSON text each. `plan` are the lines of the repair plan of the same result.
    `databases` has the alias of each database of the rules.

    The replacement is one transaction, so a reader sees either the whole previous result or the whole new result.
    Saving the same result again changes nothing.
    """
    alias = router.db_for_write(Finding)
    head = json.loads(plan[0])
    steps = {_named(step): step for step in map(json.loads, plan[1:])}
    rows = [_row(output, json.loads(line), steps, alias) for line in lines]
    saved = {
        "run": head["run"],
        "judged_at": for_column(datetime.fromisoformat(head["judged_at"]), alias),
        "causes": head["causes"][:_CAUSES],
        "plan": {"rules": head["rules"], "databases": dict(databases)},
    }
    with transaction.atomic(using=alias):
        Finding.objects.using(alias).filter(output=output).delete()
        Finding.objects.using(alias).bulk_create(rows, batch_size=_BATCH)
        SavedReconciliation.objects.using(alias).update_or_create(output=output, defaults=saved)
    return len(rows)


def _named(found: Mapping[str, Any]) -> tuple[str, ...]:
    """The values that a finding and its step of the plan have in common."""
    return tuple(found[name] or "" for name in _NAMES)


def _row(output: str, found: dict[str, Any], steps: Mapping[tuple[str, ...], Any], alias: str) -> Finding:
    step = steps.get(_named(found))
    if found.get("acknowledged"):
        found = {**found, "detail": f"acknowledged {found['acknowledged']}; {found['detail']}"}
    names = ("run", "rule", "group", "severity", "key", "detail", "message_id", "transaction_id", "row", "body")
    texts = {name: _fitting(name, found[name]) for name in names}
    times = {
        name: found[name] and for_column(datetime.fromisoformat(found[name]), alias) for name in ("at", "first_seen")
    }
    return Finding(output=output, finding_class=found["class"], step=_storable(step), **texts, **times)


def _fitting(name: str, value: str | None) -> str:
    """Return a text that fits the column. None becomes the empty text, and a text that is too long is cut.

    Characters that PostgreSQL's type `text` cannot store are replaced.
    """
    field = Finding._meta.get_field(name)
    assert isinstance(field, models.Field)
    return storable(value or "")[: field.max_length]


def _storable(step: Mapping[str, Any] | None) -> Any:
    """A step that PostgreSQL can store, otherwise None: such a step cannot be applied from the table."""
    text = json.dumps(step, ensure_ascii=False)
    return step if storable(text) == text and "\\u0000" not in text else None


@CONDITIONS.declare(
    meaning="The last saved reconciliation has open findings: rows, messages and effects that do not agree.",
    next_step="The page Findings, or `outbox_finding list`, shows each finding with its next step. Repair the "
    "findings (docs/reconciliation/findings.md), then run the reconciliation again: a saved result without open "
    "findings ends the condition.",
    concern=Concern.LOSS,
    symptom=Symptom.MISSING,
    shown=Shown(listed=Place("findings", "Findings")),
)
def reconciliation_findings(state: BrokerState) -> Iterator[Judged]:
    """The query reads one row for each output folder."""
    for saved in SavedReconciliation.objects.order_by("output"):
        for cause in saved.causes:
            yield (
                _SEVERITIES.get(cause["severity"]),
                {
                    "output": saved.output,
                    "cause": cause["subject"],
                    "findings": cause["findings"],
                    "new": cause["new"],
                    "oldest": cause["oldest"],
                },
            )
