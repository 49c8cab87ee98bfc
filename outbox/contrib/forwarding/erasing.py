"""What an erasure removes from the table of endpoints."""

from __future__ import annotations

from outbox.contrib.django.operations.personal_data import Rows, Scope, saved
from outbox.contrib.django.settings.conf import settings_of
from outbox.contrib.forwarding.settings import ForwardSettings
from outbox.erased import ERASED_TEXT


def erase_errors(rows: Rows, scope: Scope) -> int:
    """Erase the last errors of the endpoints to which the topic is forwarded: such an error does not name a message."""
    groups = {name for name, one in settings_of(ForwardSettings).forward.items() if scope.topic in one.topics}
    return saved(
        rows.exclude(last_error="").exclude(last_error=ERASED_TEXT),
        lambda row: row.group in groups or scope.mentions(row.last_error),
        lambda row: {"last_error": ERASED_TEXT},
    )
