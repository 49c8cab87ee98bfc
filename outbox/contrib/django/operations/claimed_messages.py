"""The claims and steps of a message, for `outbox_message show` and the operations page, and claims that last long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from django.db.models import DurationField, ExpressionWrapper, F
from django.db.models.functions import Length, Now
from django.db.utils import DatabaseError

from outbox.broker.operations.conditions import Concern, Declarations, Judged, Severity, Threshold
from outbox.broker.operations.state import BrokerState
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.subscribers.inbox import handler_alias
from outbox.contrib.django.subscribers.registry import subscribers
from outbox.subscription import Effects

# The condition examines at most this many claims of each database, the oldest first.
_LOOKED_AT: Final = 200


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


CONDITIONS: Final = Declarations[BrokerState]()
CLAIM_SECONDS: Final = Threshold(
    "claim_seconds",
    600,
    None,
    "seconds",
    'time for which a handler with `effects="outside"` has held the claim of its message',
)


@CONDITIONS.declare(
    meaning='Handlers with effects="outside" have run for long, and still hold the claims of their messages.',
    next_step="`outbox_message show ID` shows the steps that are done. Find the call of another system for which the "
    "handler waits, and give this call a timeout.",
    concern=Concern.PASSING,
    thresholds=(CLAIM_SECONDS,),
)
def claim_held_long(state: BrokerState) -> Iterator[Judged]:
    """A project without such handlers needs no query. The query reads a limited number of rows."""
    timeouts: dict[str, dict[str, float]] = defaultdict(dict)
    for one in subscribers():
        if one.subscription.effects is Effects.OUTSIDE:
            of_group = timeouts[handler_alias(one)]
            group, seconds = one.subscription.group, one.subscription.timeout_seconds
            # A claim does not name its topic, so the longest time limit of its group counts.
            of_group[group] = max(seconds, of_group.get(group, 0.0))
    for alias, of_group in timeouts.items():
        yield from _held(state, alias, of_group)


def _held(state: BrokerState, alias: str, timeouts: Mapping[str, float]) -> Iterator[Judged]:
    from outbox.contrib.django.models import ClaimEntry

    age = ExpressionWrapper(Now() - F("claimed_at"), output_field=DurationField())
    # A claim that has ended has no running handler, or a handler whose work will not be stored.
    held = ClaimEntry.objects.using(alias).filter(group__in=timeouts, expires_at__gt=Now()).annotate(age=age)
    columns = ("group", "message_id", "attempt", "claimed_by", "age")
    for group, message_id, attempt, process, lasted in held.order_by("claimed_at").values_list(*columns)[:_LOOKED_AT]:
        seconds, timeout_seconds = lasted.total_seconds(), timeouts[group]
        severity = state.judge(CLAIM_SECONDS, seconds)
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
