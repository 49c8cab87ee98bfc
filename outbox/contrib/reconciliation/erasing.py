"""What an erasure removes from the findings and the saved results of the reconciliation."""

from __future__ import annotations

import json
from typing import Any

from outbox.contrib.django.operations.personal_data import Rows, Scope, saved
from outbox.erased import ERASED_TEXT


def erase_findings(rows: Rows, scope: Scope) -> int:
    """Replace the texts of findings that belong to an erased message or mention an erased text."""
    ids = {str(one) for one in (*scope.message_ids, *scope.transaction_ids)}
    names = ("detail", "row", "body")

    def is_about(row: Any) -> bool:
        linked = row.message_id in ids or row.transaction_id in ids or (scope.key is not None and row.key == scope.key)
        texts = " ".join([*(getattr(row, name) for name in (*names, "key")), json.dumps(row.step, ensure_ascii=False)])
        done = row.step is None and all(getattr(row, name) in ("", ERASED_TEXT) for name in names)
        return (linked and not (done and (scope.replacement is None or row.key != scope.key))) or scope.mentions(texts)

    def erased(row: Any) -> dict[str, str | None]:
        key = scope.replacement if scope.replacement and row.key == scope.key else scope.cleaned(row.key)
        # The step of the repair plan quotes the message.
        return {"key": key, "step": None} | {name: ERASED_TEXT for name in names if getattr(row, name)}

    return saved(rows, is_about, erased)


def erase_results(rows: Rows, scope: Scope) -> int:
    """Remove erased texts from the causes and the rules of saved results."""
    return saved(
        rows,
        lambda row: scope.cleaned([row.causes, row.plan]) != [row.causes, row.plan],
        lambda row: {"causes": scope.cleaned(row.causes), "plan": scope.cleaned(row.plan)},
    )
