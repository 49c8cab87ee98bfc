"""What an erasure removes from the table of tasks."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from django.db.models import Q

from outbox.contrib.django.operations.personal_data import Rows, Scope, saved


def erase_calls(rows: Rows, scope: Scope) -> int:
    """Erase arguments, results and errors of tasks. A task that has not run gets the status FAILED."""
    empty: dict[str, Any] = {"args": [], "kwargs": {}, "errors": [], "return_value": None}

    def is_about(row: Any) -> bool:
        values = {name: getattr(row, name) for name in empty}
        linked = row.message_id in scope.message_ids or scope.mentions(json.dumps(values, ensure_ascii=False))
        return linked and values != empty

    def erased(row: Any) -> dict[str, Any]:
        over = {"status": "FAILED", "finished_at": row.finished_at or datetime.now(UTC)}
        return empty | (over if row.status in ("READY", "RUNNING") else {})

    return saved(rows.filter(Q(message_id__in=scope.message_ids)) if not scope.texts else rows, is_about, erased)
