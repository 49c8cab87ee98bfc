"""The claims and steps of a message, for `outbox_message show` and the operations page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from django.db.models.functions import Length
from django.db.utils import DatabaseError

from outbox.contrib.django.ledger.ledger_checker import ledger_aliases

_CLAIM: Final = ("group", "message_id", "generation", "attempt", "token", "claimed_by", "claimed_at", "expires_at")
_STEP: Final = ("group", "message_id", "generation", "name", "attempt", "begun_at", "ended_at")


def claimed_messages(message_ids: Sequence[UUID]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the `claims` and `steps` of these messages in all application databases, as rows by column.

    A claim is an attempt that has begun and not finished; after a failed attempt, its `expires_at` is in the past. A
    step without a result has neither `ended_at` nor `bytes`, the size of the result. `unknown_claims`: the reason `why`
    a database cannot be read. The result has no key for an empty list.
    """
    from outbox.contrib.django.models import ClaimEntry, StepEntry

    found: dict[str, list[Mapping[str, Any]]] = {"claims": [], "steps": [], "unknown_claims": []}
    for alias in ledger_aliases(usable=True):
        claims = ClaimEntry.objects.using(alias).filter(message_id__in=message_ids).order_by("claimed_at")
        steps = StepEntry.objects.using(alias).filter(message_id__in=message_ids).order_by("begun_at")
        try:
            found["claims"].extend(claims.values(*_CLAIM))
            # The result itself may contain personal data, and may be large.
            found["steps"].extend(steps.values(*_STEP, bytes=Length("result")))
        except DatabaseError as error:
            found["unknown_claims"].append({"why": f"the claims on {alias!r} cannot be read: {str(error).strip()}"})
    return {name: rows for name, rows in found.items() if rows}
