"""Reports each change of a condition once for all processes of the service: as a log record and as a Django signal.

    raised.run_once()  # {"changes": 2}

The rows of `RaisedCondition` are the conditions that are reported. Of several processes that see the same change, the
one whose statement changes the row reports the change, after COMMIT. A process that dies in between loses the report,
so a change is reported at most once; the condition itself stays visible in every status.

The rows are in the application's database, because the broker is often the part that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from django.db import router, transaction
from django.utils import timezone

from outbox.broker.operations.conditions import EVIDENCE, SUBJECT, Condition, ConditionReport, Fact, Severity
from outbox.broker.operations.rules import unusable
from outbox.contrib.django.models import RaisedCondition
from outbox.contrib.django.operations import signals
from outbox.contrib.django.operations.known_conditions import catalogue
from outbox.contrib.django.operations.watching import asking, survey_project
from outbox.errors import BrokerError, BrokerUnavailable
from outbox.utils import heartbeat

logger = logging.getLogger(__name__)

# A condition is cleared when no pass has seen it for this time. A condition that holds on and off is reported once.
CLEAR_SECONDS: Final = 60.0
_LONGEST_SUBJECT: Final = 400
_LOG_LEVELS: Final = {Severity.WARNING: logging.WARNING, Severity.CRITICAL: logging.ERROR}

# The name and the subject of a condition.
_Key = tuple[str, str]


def run_once(now: datetime | None = None) -> dict[str, int]:
    """Compare what holds now with the stored rows, store the changes, and report them. Return the counts.

    If the broker does not answer, the condition `unreachable` is raised, and no condition is cleared. Raises
    ConfigurationError, and Django's DatabaseError if the application's database does not answer.
    """
    now = now or timezone.now()
    try:
        with asking() as run:
            seen = survey_project(run).verdict
        heartbeat.reached(True)
    except BrokerError as error:
        heartbeat.reached(not isinstance(error, BrokerUnavailable))
        seen = unusable(error)
    changes = _stored(seen, now)
    for change in changes:
        _report(change)
    return {"changes": len(changes)}


# -- what holds ------------------------------------------------------------------------------------


def by_subject(conditions: Iterable[Condition]) -> tuple[dict[_Key, Condition], set[str]]:
    """Return the conditions by name and subject, and the names of those that may hold for further subjects.

    Of a condition with several subjects, each has only its own facts as evidence.
    """
    found: dict[_Key, Condition] = {}
    unsure = set()
    declared = catalogue()
    for one in conditions:
        if one.is_unknown:
            unsure.add(one.name)
            continue
        if len(one.evidence) >= EVIDENCE or one.count > len(one.evidence):
            unsure.add(one.name)
        own = declared[one.name].subject if one.name in declared else ()
        facts: dict[str, list[Fact]] = {}
        for fact in one.evidence or [{}]:
            facts.setdefault(_subject(fact, own), []).append(fact)
        for subject, its in facts.items():
            found[one.name, subject] = one if len(facts) == 1 else replace(one, evidence=its, count=len(its))
    return found, unsure


def _subject(fact: Fact, own: Sequence[str]) -> str:
    """Return the subject that a fact names, like "group billing, topic orders"; '' if it names none."""
    names = (name for name in (*SUBJECT, *own) if fact.get(name) not in (None, ""))
    named = (f"{name.removesuffix('_group')} {fact[name]}" for name in names)
    return ", ".join(named)[:_LONGEST_SUBJECT]


# -- changes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """A row that was raised, has another severity, or was cleared. `held` is None if it was cleared."""

    row: RaisedCondition
    held: Condition | None


def _stored(seen: ConditionReport, now: datetime) -> list[Change]:
    alias = router.db_for_write(RaisedCondition)
    rows = RaisedCondition.objects.using(alias)
    # A condition with one of the `unsure` names is not cleared, because not all was read.
    held_now, unsure = by_subject(seen.conditions)
    changes: list[Change] = []
    with transaction.atomic(using=alias):
        # Two processes that change rows in different orders would deadlock, so each locks all rows in one order first.
        known = {(row.name, row.subject): row for row in rows.order_by("pk").select_for_update()}
        for (name, subject), held in sorted(held_now.items(), key=lambda one: one[0]):
            row = known.get((name, subject))
            if row is None:
                values = {"severity": held.severity, "raised_at": now, "seen_at": now}
                row, is_new = rows.get_or_create(name=name, subject=subject, defaults=values)
                # Another process may have stored the new row meanwhile.
                changes += [Change(row, held)] if is_new else []
            elif held.severity != row.severity:
                row.severity = held.severity
                row.save(using=alias, update_fields=["severity"])
                changes.append(Change(row, held))
        rows.filter(pk__in=[row.pk for key, row in known.items() if key in held_now]).update(seen_at=now)
        if seen.is_complete:
            before = now - timedelta(seconds=CLEAR_SECONDS)
            absent = [row for key, row in known.items() if key not in held_now and row.name not in unsure]
            gone = sorted((row for row in absent if row.seen_at <= before), key=lambda row: (row.name, row.subject))
            rows.filter(pk__in=[row.pk for row in gone]).delete()
            changes += [Change(row, None) for row in gone]
    return changes


def _report(change: Change) -> None:
    row, held = change.row, change.held
    severity = Severity(row.severity) if held else Severity.OK
    text, next_step = (held.text, held.next_step) if held else ("", "")
    of = f" ({row.subject})" if row.subject else ""
    if severity is not Severity.OK:
        logger.log(_LOG_LEVELS[severity], "condition %s%s: %s What to do: %s", row.name, of, text, next_step)
    else:
        logger.info("condition %s%s is over; it held since %s", row.name, of, row.raised_at)
    signals.send(
        "condition_changed",
        name=row.name,
        subject=row.subject,
        severity=severity.name.lower(),
        text=text,
        next_step=next_step,
        since=row.raised_at,
    )
