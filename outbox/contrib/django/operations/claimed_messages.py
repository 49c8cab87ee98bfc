"""The claims and steps of a message, for `outbox_message show` and the operations page, and claims that last long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from django.db.models import DurationField, ExpressionWrapper, F
from django.db.models.functions import Length, Now
from django.db.utils import DatabaseError

from outbox.broker.database.executor import Executor
from outbox.broker.operations.conditions import Condition, Judged, Severity, condition
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers.inbox import handler_alias
from outbox.contrib.django.subscribers.registry import subscribers
from outbox.subscription import Effects

# The condition examines at most this many claims of each database, the oldest first.
_LOOKED_AT: Final = 200


@dataclass(frozen=True, slots=True)
class ShownClaim:
    """An attempt that has begun and not finished. After a failed attempt, `expires_at` is in the past."""

    group: str
    message_id: str
    generation: int
    attempt: int
    token: int
    claimed_by: str
    claimed_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class ShownStep:
    """A step. `ended_at` and `bytes` (the size of the result) are None if the step has no result."""

    group: str
    message_id: str
    generation: int
    name: str
    attempt: int
    begun_at: datetime
    ended_at: datetime | None
    bytes: int | None


@dataclass(frozen=True, slots=True)
class ClaimedMessages:
    """The claims and steps of some messages. `unknown` has a text for each database that cannot be read."""

    claims: list[ShownClaim]
    steps: list[ShownStep]
    unknown: list[str]

    def as_json(self) -> dict[str, list[Any]]:
        """The sections of `outbox_message show`."""
        return {
            "claims": [asdict(one) for one in self.claims],
            "steps": [asdict(one) for one in self.steps],
            "unknown_claims": [{"why": text} for text in self.unknown],
        }


def claimed_messages(message_ids: Sequence[UUID]) -> ClaimedMessages:
    """Return the claims and steps of these messages in all application databases."""
    found = ClaimedMessages([], [], [])
    for alias in ledger_aliases(usable=True):
        try:
            found.claims.extend(_claims(alias, message_ids))
            found.steps.extend(_steps(alias, message_ids))
        except DatabaseError as error:
            found.unknown.append(f"the claims on {alias!r} cannot be read: {str(error).strip()}")
    return found


def _claims(alias: str, message_ids: Sequence[UUID]) -> Iterator[ShownClaim]:
    from outbox.contrib.django.models import ClaimEntry

    for row in ClaimEntry.objects.using(alias).filter(message_id__in=message_ids).order_by("claimed_at"):
        yield ShownClaim(
            row.group,
            str(row.message_id),
            row.generation,
            row.attempt,
            row.token,
            row.claimed_by,
            row.claimed_at,
            row.expires_at,
        )


def _steps(alias: str, message_ids: Sequence[UUID]) -> Iterator[ShownStep]:
    from outbox.contrib.django.models import StepEntry

    rows = StepEntry.objects.using(alias).filter(message_id__in=message_ids).order_by("begun_at")
    columns = ("group", "message_id", "generation", "name", "attempt", "begun_at", "ended_at", "size")
    # The result itself may contain personal data, and may be large.
    for group, message_id, *rest in rows.annotate(size=Length("result")).values_list(*columns):
        yield ShownStep(group, str(message_id), *rest)


def rule(run: Executor) -> Sequence[Condition]:
    """Return the condition for handlers that have held their claim for long, if there are any.

    A project without handlers with effects="outside" needs no query. The query reads a limited number of rows.
    """
    timeouts: dict[str, dict[str, float]] = defaultdict(dict)
    for one in subscribers():
        if one.subscription.effects is Effects.OUTSIDE:
            of_group = timeouts[handler_alias(one)]
            group, seconds = one.subscription.group, one.subscription.timeout_seconds
            # A claim does not name its topic, so the longest time limit of its group counts.
            of_group[group] = max(seconds, of_group.get(group, 0.0))
    return condition("claim_held_long", [one for alias, groups in timeouts.items() for one in _held(alias, groups)])


def _held(alias: str, timeouts: Mapping[str, float]) -> Iterator[Judged]:
    from outbox.contrib.django.models import ClaimEntry

    age = ExpressionWrapper(Now() - F("claimed_at"), output_field=DurationField())
    # A claim that has ended has no running handler, or a handler whose work will not be stored.
    held = ClaimEntry.objects.using(alias).filter(group__in=timeouts, expires_at__gt=Now()).annotate(age=age)
    columns = ("group", "message_id", "attempt", "claimed_by", "age")
    for group, message_id, attempt, process, lasted in held.order_by("claimed_at").values_list(*columns)[:_LOOKED_AT]:
        seconds, timeout_seconds = lasted.total_seconds(), timeouts[group]
        severity = get_settings().thresholds.claim_seconds.judge(seconds)
        if seconds >= timeout_seconds:
            severity = severity or Severity.WARNING
        yield (
            severity,
            {
                "group": group,
                "message": str(message_id),
                "attempt": attempt,
                "process": process,
                "held_seconds": round(seconds),
                "timeout_seconds": timeout_seconds,
            },
        )
