"""The claims and steps of a message, for `outbox_message show` and the operations page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from django.db.models.functions import Length
from django.db.utils import DatabaseError

from outbox.contrib.django.ledger.ledger_checker import ledger_aliases

_CLAIM: Final = ("group", "message_id", "generation", "attempt", "token", "claimed_by", "claimed_at", "expires_at")
_STEP: Final = ("group", "message_id", "generation", "name", "attempt", "begun_at", "ended_at")


@dataclass(frozen=True, slots=True)
class ClaimedMessages:
    """The claims and steps of some messages, as rows by column. `unknown`: why a database cannot be read.

    A claim is an attempt that has begun and not finished; after a failed attempt, its `expires_at` is in the past. A
    step without a result has neither `ended_at` nor `bytes`, the size of the result.
    """

    claims: list[Mapping[str, Any]]
    steps: list[Mapping[str, Any]]
    unknown: list[str]

    def as_json(self) -> dict[str, list[Any]]:
        """The sections of `outbox_message show`."""
        return {
            "claims": self.claims,
            "steps": self.steps,
            "unknown_claims": [{"why": text} for text in self.unknown],
        }


def claimed_messages(message_ids: Sequence[UUID]) -> ClaimedMessages:
    """Return the claims and steps of these messages in all application databases."""
    from outbox.contrib.django.models import ClaimEntry, StepEntry

    found = ClaimedMessages([], [], [])
    for alias in ledger_aliases(usable=True):
        claims = ClaimEntry.objects.using(alias).filter(message_id__in=message_ids).order_by("claimed_at")
        steps = StepEntry.objects.using(alias).filter(message_id__in=message_ids).order_by("begun_at")
        try:
            found.claims.extend(claims.values(*_CLAIM))
            # The result itself may contain personal data, and may be large.
            found.steps.extend(steps.values(*_STEP, bytes=Length("result")))
        except DatabaseError as error:
            found.unknown.append(f"the claims on {alias!r} cannot be read: {str(error).strip()}")
    return found
