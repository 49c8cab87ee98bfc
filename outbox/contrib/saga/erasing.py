"""What an erasure removes from the table of sagas."""

from __future__ import annotations

from outbox.contrib.django.operations.personal_data import Rows, Scope, saved
from outbox.erased import ERASED_TEXT


def erase_reasons(rows: Rows, scope: Scope) -> int:
    """Replace the reasons of sagas that belong to an erased message or mention an erased text."""
    return saved(
        rows.exclude(reason="").exclude(reason=ERASED_TEXT),
        lambda row: row.message_id in scope.message_ids or scope.mentions(row.reason),
        lambda row: {"reason": ERASED_TEXT},
    )
