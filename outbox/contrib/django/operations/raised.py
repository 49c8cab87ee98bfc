"""Reports each change of a condition once for all processes of the service: as a log record and as a Django signal.

    raised.run_once()  # {"changes": 2}

The rows of `RaisedCondition` are the conditions that are reported. Of several processes that see the same change, the
one whose statement changes the row reports the change, after COMMIT. A process that dies in between loses the report,
so a change is reported at most once; the condition itself stays visible in every status. A condition that is over
becomes a row of `PastCondition`, which the operations page shows as a timeline.

The rows are in the application's database, because the broker is often the part that fails. A gap of more than a minute
between two passes becomes a row too, because a history without watching would look like one without incidents.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from django.db import router, transaction
from django.db.models import F, Max
from django.db.models.functions import Greatest
from django.utils import timezone

from outbox.broker.database.executor import Executor
from outbox.broker.database.timeouts import lock_limited
from outbox.broker.operations.conditions import EVIDENCE, SUBJECT, Condition, Fact, Severity
from outbox.broker.operations.listings import OpenTransaction, list_open
from outbox.broker.operations.rules import unusable
from outbox.contrib.django.models import PastCondition, RaisedCondition
from outbox.contrib.django.operations import signals
from outbox.contrib.django.operations.known_conditions import catalogue
from outbox.contrib.django.operations.watching import asking, survey_project
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import BrokerUnavailable, SchemaError

logger = logging.getLogger(__name__)

Kind = RaisedCondition.Kind

# A condition is cleared when no pass has seen it for this time. A condition that holds on and off is reported once.
CLEAR_SECONDS: Final = 60.0
# Past conditions are kept for this time, but only the newest KEPT_ROWS of them.
KEPT_SECONDS: Final = 7 * 24 * 3600.0
KEPT_ROWS: Final = 10_000
# The largest number of parked transactions that a pass reads.
_MOST_PARKED: Final = 1000
_LONGEST_SUBJECT: Final = 400
_LOG_LEVELS: Final = {Severity.WARNING: logging.WARNING, Severity.CRITICAL: logging.ERROR}

_Held = Condition | OpenTransaction
_Key = tuple[str, str, str]


@dataclass
class _Seen:
    """All that holds now. A row of one of the `unsure` kinds and names is not cleared, because not all was read."""

    held: dict[_Key, _Held] = field(default_factory=dict)
    unsure: set[tuple[str, str]] = field(default_factory=set)
    is_complete: bool = True


def run_once(now: datetime | None = None) -> dict[str, int]:
    """Compare what holds now with the stored rows, store the changes, and report them. Return the counts.

    If the broker does not answer, the condition `unreachable` is raised, and no condition is cleared. Raises
    ConfigurationError, and Django's DatabaseError if the application's database does not answer.
    """
    now = now or timezone.now()
    changes = _stored(_seen(), now)
    for change in changes:
        _report(change)
    return {"changes": len(changes)}


# -- what holds ------------------------------------------------------------------------------------


def _seen() -> _Seen:
    try:
        with asking() as run:
            found = survey_project(run)
            seen = _of(found.verdict.conditions, is_complete=found.verdict.is_complete)
            if found.state is not None:
                with lock_limited(run.connection):
                    _add_parked(seen, run)
            return seen
    except (BrokerUnavailable, SchemaError) as error:
        return _of(unusable(error).conditions, is_complete=False)


def _of(conditions: Iterable[Condition], *, is_complete: bool) -> _Seen:
    found, unsure = by_subject(conditions)
    return _Seen(
        {(Kind.CONDITION, *key): one for key, one in found.items()},
        {(Kind.CONDITION, name) for name in unsure},
        is_complete,
    )


def by_subject(conditions: Iterable[Condition]) -> tuple[dict[tuple[str, str], Condition], set[str]]:
    """Return the conditions by name and subject, and the names of those that may hold for further subjects."""
    found: dict[tuple[str, str], Condition] = {}
    unsure = set()
    declared = catalogue()
    for one in conditions:
        if one.is_unknown:
            unsure.add(one.name)
            continue
        if len(one.evidence) >= EVIDENCE or one.count > len(one.evidence):
            unsure.add(one.name)
        own = declared[one.name].subject if one.name in declared else ()
        found |= dict.fromkeys(((one.name, _subject(fact, own)) for fact in one.evidence or [{}]), one)
    return found, unsure


def _subject(fact: Fact, own: Sequence[str]) -> str:
    """Return the subject that a fact names, like "group billing, topic orders"; '' if it names none."""
    names = (name for name in (*SUBJECT, *own) if fact.get(name) not in (None, ""))
    named = (f"{name.removesuffix('_group')} {fact[name]}" for name in names)
    return ", ".join(named)[:_LONGEST_SUBJECT]


def _add_parked(seen: _Seen, run: Executor) -> None:
    group = get_settings().producer_group
    if not group or not signals.transaction_parked.has_listeners(None):
        return
    found = list_open(run, group=group, parked=True, limit=_MOST_PARKED)
    if len(found) >= _MOST_PARKED:
        seen.unsure.add((Kind.TRANSACTION, "parked"))
    for one in found:
        seen.held[Kind.TRANSACTION, "parked", str(one.transaction_id)] = one


# -- changes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """A row that was raised, has another severity, or was cleared. `held` is None if it was cleared."""

    row: RaisedCondition
    held: _Held | None


def _stored(seen: _Seen, now: datetime) -> list[Change]:
    alias = router.db_for_write(RaisedCondition)
    rows = RaisedCondition.objects.using(alias)
    with transaction.atomic(using=alias):
        # Two processes that change rows in different orders would deadlock, so each locks all rows in one order first.
        locked = rows.exclude(kind=Kind.PASS).order_by("pk").select_for_update()
        known = {(row.kind, row.name, row.subject): row for row in locked}
        changes = list(_raised(seen, known, now, alias))
        rows.filter(pk__in=[row.pk for key, row in known.items() if key in seen.held]).update(seen_at=now)
        cleared = _cleared(seen, known, now, alias)
        changes += cleared
        _remember([change.row for change in cleared if change.row.kind == Kind.CONDITION], now, alias)
    return changes


def _raised(seen: _Seen, known: dict[_Key, RaisedCondition], now: datetime, alias: str) -> Iterator[Change]:
    rows = RaisedCondition.objects.using(alias)
    for key in sorted(seen.held):
        held, row = seen.held[key], known.get(key)
        severity = held.severity if isinstance(held, Condition) else Severity.WARNING
        if row is None:
            kind, name, subject = key
            values = {"severity": severity, "worst": severity, "raised_at": now, "seen_at": now}
            row, is_new = rows.get_or_create(kind=kind, name=name, subject=subject, defaults=values)
            if is_new:
                yield Change(row, held)
        elif severity != row.severity:
            # Another process may have stored the change meanwhile.
            same = rows.filter(pk=row.pk, severity=row.severity)
            if same.update(severity=severity, worst=Greatest(F("worst"), int(severity))):
                row.severity = severity
                yield Change(row, held)


def _cleared(seen: _Seen, known: dict[_Key, RaisedCondition], now: datetime, alias: str) -> list[Change]:
    if not seen.is_complete:
        return []
    before = now - timedelta(seconds=CLEAR_SECONDS)
    gone = [
        row
        for key, row in sorted(known.items())
        if key not in seen.held and key[:2] not in seen.unsure and row.seen_at <= before
    ]
    rows = RaisedCondition.objects.using(alias)
    # Another process may have seen the condition meanwhile.
    return [Change(row, None) for row in gone if rows.filter(pk=row.pk, seen_at__lte=before).delete()[0]]


def _remember(over: Sequence[RaisedCondition], now: datetime, alias: str) -> None:
    """Store the conditions that are over, and the end of a time in which the pass ran; delete the oldest rows."""
    past = PastCondition.objects.using(alias)
    ended = [*over, *_gap(now, alias)]
    past.bulk_create(
        PastCondition(
            name=row.name,
            subject=row.subject,
            severity=max(row.worst, row.severity),
            raised_at=row.raised_at,
            seen_at=row.seen_at,
        )
        for row in ended
    )
    if ended:
        past.filter(seen_at__lt=now - timedelta(seconds=KEPT_SECONDS)).delete()
        past.filter(pk__lte=(past.aggregate(newest=Max("pk"))["newest"] or 0) - KEPT_ROWS).delete()


def _gap(now: datetime, alias: str) -> list[RaisedCondition]:
    """Note that the pass runs now. If no pass has run for CLEAR_SECONDS, return the row of the time before."""
    rows = RaisedCondition.objects.using(alias)
    values = {"severity": Severity.OK, "raised_at": now, "seen_at": now}
    row, is_new = rows.get_or_create(kind=Kind.PASS, name="", subject="", defaults=values)
    if is_new or row.seen_at >= now:
        return []
    begins_again = now - row.seen_at > timedelta(seconds=CLEAR_SECONDS)
    values = {"raised_at": now, "seen_at": now} if begins_again else {"seen_at": now}
    # Another process may have noted its pass meanwhile.
    is_mine = rows.filter(pk=row.pk, seen_at=row.seen_at).update(**values)
    return [row] if is_mine and begins_again else []


def _report(change: Change) -> None:
    row, held = change.row, change.held
    if isinstance(held, OpenTransaction):
        signals.send(
            "transaction_parked",
            transaction_id=held.transaction_id,
            producer_group=get_settings().producer_group,
            topics=held.topics,
            key=held.key,
            checks=held.checks,
            last_answer=held.last_answer,
        )
    elif row.kind == Kind.CONDITION:
        severity = Severity(row.severity) if held else Severity.OK
        text, next_step = (held.text, held.next_step) if held else ("", "")
        _log(severity, row, text, next_step)
        signals.send(
            "condition_changed",
            name=row.name,
            subject=row.subject,
            severity=severity.name.lower(),
            text=text,
            next_step=next_step,
            since=row.raised_at,
        )


def _log(severity: Severity, row: RaisedCondition, text: str, next_step: str) -> None:
    of = f" ({row.subject})" if row.subject else ""
    if severity is Severity.OK:
        logger.info("condition %s%s is over; it held since %s", row.name, of, row.raised_at)
    else:
        logger.log(_LOG_LEVELS[severity], "condition %s%s: %s What to do: %s", row.name, of, text, next_step)
