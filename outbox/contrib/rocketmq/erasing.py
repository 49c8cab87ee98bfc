"""What an erasure removes from the tables of this part."""

from __future__ import annotations

from typing import Any

from outbox.contrib.django.operations.personal_data import Rows, Scope, saved
from outbox.erased import ERASED_CONTENT_TYPE, ERASED_TEXT, kept_headers


def erase_notes(rows: Rows, scope: Scope) -> int:
    """Replace the errors of dead letters that belong to an erased message or mention an erased text."""
    return saved(
        rows.exclude(error="").exclude(error=ERASED_TEXT),
        lambda row: row.message_id in scope.message_ids or scope.mentions(row.error),
        lambda row: {"error": ERASED_TEXT},
    )


def erase_relayed(rows: Rows, scope: Scope) -> int:
    """Erase messages that wait for the relay. The relay sends them as erased messages, with their ids."""

    def is_of_message(row: Any) -> bool:
        has_key = row.topic == scope.topic and scope.key is not None and row.key == scope.key
        return has_key or row.message_id in scope.message_ids

    def erased(row: Any) -> dict[str, Any]:
        if not is_of_message(row):
            return {"error": scope.cleaned(row.error)}
        return {
            "content_type": ERASED_CONTENT_TYPE,
            # RocketMQ refuses an empty body.
            "body": b"0",
            "size": 1,
            "key": scope.replacement if scope.replacement and row.key == scope.key else row.key,
            "headers": kept_headers(row.headers),
            "error": row.error and ERASED_TEXT,
        }

    return saved(
        rows,
        lambda row: (is_of_message(row) and row.content_type != ERASED_CONTENT_TYPE) or scope.mentions(row.error),
        erased,
    )
