"""What an erasure removes from the table of unique keys."""

from __future__ import annotations

from outbox.contrib.django.operations.personal_data import Rows, Scope


def erase_keys(rows: Rows, scope: Scope) -> int:
    """Delete the rows of the erased messages: a unique key is chosen by the application, so it may be personal."""
    return rows.filter(message_id__in=scope.message_ids).delete()[0]
