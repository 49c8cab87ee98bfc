"""Notes about the dead letters of RocketMQ, in the application's database (see `DeadLetterNote`).

See decision 260.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections, router
from django.utils import timezone

from outbox.contrib.django.operations.personal_data import Rows, Scope, saved
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.rocketmq.models import DeadLetterNote
from outbox.erased import ERASED_TEXT
from outbox.utils.given_up import GivenUp

logger = logging.getLogger(__name__)


def note(letter: GivenUp) -> None:
    """Store the error of a dead letter.

    If the database does not store it, only log it: the message must still become a dead letter.
    """
    try:
        if not (connection := connections[_alias()]).in_atomic_block:
            # The server may have restarted since this thread last used its connection.
            connection.close_if_unusable_or_obsolete()
        DeadLetterNote.objects.using(_alias()).update_or_create(
            group=letter.group,
            message_id=letter.message_id,
            defaults={
                "attempts": letter.attempts,
                "error": letter.error,
                "noted_at": timezone.now(),
            },
        )
    except (DatabaseError, InterfaceError) as error:
        logger.warning(
            "the error of dead letter %s of group %r could not be noted (%s): %s",
            letter.message_id,
            letter.group,
            str(error).strip(),
            letter.error,
        )


def notes_of(group: str) -> Mapping[UUID, DeadLetterNote]:
    """The notes of a group, by message id."""
    return {one.message_id: one for one in DeadLetterNote.objects.using(_alias()).filter(group=group)}


def settle(group: str, letters: Iterable[tuple[UUID, int]], *, is_discarded: bool) -> None:
    """Mark dead letters (message id, time of storing in milliseconds) as replayed or discarded."""
    now = timezone.now()
    for message_id, stored_milliseconds in letters:
        values = {"settled_until": stored_milliseconds, "settled_at": now, "is_discarded": is_discarded}
        DeadLetterNote.objects.using(_alias()).update_or_create(
            group=group, message_id=message_id, defaults=values, create_defaults={**values, "noted_at": now}
        )


def prune() -> Mapping[str, Any]:
    """Remove the notes about dead letters that RocketMQ does not have any more. This is a periodic pass."""
    seconds = get_settings().inbox_retention_seconds
    old = DeadLetterNote.objects.using(_alias()).filter(noted_at__lt=timezone.now() - timedelta(seconds=seconds))
    return {"removed": old.delete()[0]}


def erase_notes(rows: Rows, scope: Scope) -> int:
    """Replace the errors of dead letters that belong to an erased message or mention an erased text."""
    return saved(
        rows.exclude(error="").exclude(error=ERASED_TEXT),
        lambda row: row.message_id in scope.message_ids or scope.mentions(row.error),
        lambda row: {"error": ERASED_TEXT},
    )


def _alias() -> str:
    return router.db_for_write(DeadLetterNote)
