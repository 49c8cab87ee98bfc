"""Finds the conditions that were raised or cleared since the last pass, once for all processes of the service.

The rows of `RaisedCondition` are the conditions that are reported. One transaction stores a change and the
notifications about it. Of several processes that see the same change, the one whose statement changes the row reports
the change. The signals follow after COMMIT. A condition that is over becomes a row of `PastCondition`, which the
operations page shows as a timeline.

See decisions 208 and 230.
"""

from __future__ import annotations

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
from outbox.broker.operations.conditions import EVIDENCE, Condition, Fact, Severity
from outbox.broker.operations.listings import ErrorGroup, OpenTransaction, list_errors, list_open
from outbox.broker.operations.rules import survey, unusable
from outbox.contrib.django.models import PastCondition, RaisedCondition
from outbox.contrib.django.operations import notifications, signals
from outbox.contrib.django.operations.watching import asking, with_application
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import BrokerUnavailable, SchemaError

Kind = RaisedCondition.Kind

# A condition is cleared when no pass has seen it for this time. A condition that holds on and off is reported once.
CLEAR_SECONDS: Final = 60.0
# New dead letters of a group with the same type of error are reported again after this time at the earliest.
REPEAT_SECONDS: Final = 600.0
# Past conditions are kept for this time, but only the newest KEPT_ROWS of them.
KEPT_SECONDS: Final = 7 * 24 * 3600.0
KEPT_ROWS: Final = 10_000
# The largest number of parked transactions that a pass reads.
_MOST_PARKED: Final = 1000
_LONGEST_SUBJECT: Final = 400

# The facts that name the subject of a condition. Other facts are measured values, which differ from pass to pass, or
# single messages, which are too many.
_SUBJECTS: Final = (
    *("group", "topic", "queue", "producer_group", "pass", "receiver", "alias", "table", "failing", "subject"),
    *("database", "replica", "counter", "sequence", "saga"),
)


@dataclass(frozen=True, slots=True)
class _Held:
    """What holds at the time of a pass: one future row of `RaisedCondition`."""

    severity: Severity
    condition: Condition | None = None
    error: ErrorGroup | None = None
    transaction: OpenTransaction | None = None


_Key = tuple[str, str, str]


@dataclass
class _Seen:
    """All that holds now. A row of one of the `unsure` kinds and names is not cleared, because not all was read."""

    held: dict[_Key, _Held] = field(default_factory=dict)
    unsure: set[tuple[str, str]] = field(default_factory=set)
    is_complete: bool = True


def run_once(now: datetime | None = None) -> dict[str, int]:
    """Compare what holds now with the stored rows, store the changes, and send their signals. Return the counts.

    If the broker does not answer, the condition `unreachable` is raised, and no condition is cleared. Raises
    ConfigurationError, and Django's DatabaseError if the application's database does not answer.
    """
    now = now or timezone.now()
    changes = _stored(_seen(), now)
    for change in changes:
        _signal(change)
    notifications.deliver_soon()
    return {"changes": len(changes)}


# -- what holds ------------------------------------------------------------------------------------


def _seen() -> _Seen:
    settings = get_settings()
    try:
        with asking() as run:
            found = survey(run, settings.thresholds)
            if found.summary is None:
                return _of(found.verdict.conditions, is_complete=False)
            with lock_limited(run.connection):
                seen = _of(with_application(found.verdict, run).conditions, is_complete=found.verdict.is_complete)
                _add_errors(seen, list_errors(run))
                _add_parked(seen, run)
                return seen
    except (BrokerUnavailable, SchemaError) as error:
        return _of(unusable(error).conditions, is_complete=False)


def _of(conditions: Iterable[Condition], *, is_complete: bool) -> _Seen:
    found, unsure = by_subject(conditions)
    return _Seen(
        {(Kind.CONDITION, *key): _Held(one.severity, condition=one) for key, one in found.items()},
        {(Kind.CONDITION, name) for name in unsure},
        is_complete,
    )


def by_subject(conditions: Iterable[Condition]) -> tuple[dict[tuple[str, str], Condition], set[str]]:
    """Return the conditions by name and subject, and the names of those that may hold for further subjects."""
    found: dict[tuple[str, str], Condition] = {}
    unsure = set()
    for one in conditions:
        if one.is_unknown:
            unsure.add(one.name)
            continue
        if len(one.evidence) >= EVIDENCE or one.count > len(one.evidence):
            unsure.add(one.name)
        found |= dict.fromkeys(((one.name, subject_of(fact)) for fact in one.evidence or [{}]), one)
    return found, unsure


def subject_of(fact: Fact) -> str:
    """Return the subject that a fact names, like "group billing, topic orders"; '' if it names none."""
    named = (f"{name.removesuffix('_group')} {fact[name]}" for name in _SUBJECTS if fact.get(name) not in (None, ""))
    return ", ".join(named)[:_LONGEST_SUBJECT]


def _add_errors(seen: _Seen, errors: Sequence[ErrorGroup]) -> None:
    for one in errors:
        subject = f"group {one.group}, error {one.error_type}"[:_LONGEST_SUBJECT]
        seen.held[Kind.ERROR, "dead_letters", subject] = _Held(Severity.WARNING, error=one)


def _add_parked(seen: _Seen, run: Executor) -> None:
    group = get_settings().producer_group
    if not group or not signals.transaction_parked.has_listeners(None):
        return
    found = list_open(run, group=group, parked=True, limit=_MOST_PARKED)
    if len(found) >= _MOST_PARKED:
        seen.unsure.add((Kind.TRANSACTION, "parked"))
    for one in found:
        seen.held[Kind.TRANSACTION, "parked", str(one.transaction_id)] = _Held(Severity.WARNING, transaction=one)


# -- changes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """A row that was raised or cleared. `held` is None if it was cleared."""

    row: RaisedCondition
    held: _Held | None


def _stored(seen: _Seen, now: datetime) -> list[Change]:
    alias = router.db_for_write(RaisedCondition)
    rows = RaisedCondition.objects.using(alias)
    with transaction.atomic(using=alias):
        known = {(row.kind, row.name, row.subject): row for row in rows.exclude(kind=Kind.PASS)}
        changes = list(_raised(seen, known, now, alias))
        rows.filter(pk__in=[row.pk for key, row in known.items() if key in seen.held]).update(seen_at=now)
        cleared = _cleared(seen, known, now, alias)
        changes += cleared
        _remember([change.row for change in cleared if change.row.kind == Kind.CONDITION], now, alias)
        notifications.store(_reports(changes), now)
    return changes


def _raised(seen: _Seen, known: dict[_Key, RaisedCondition], now: datetime, alias: str) -> Iterator[Change]:
    rows = RaisedCondition.objects.using(alias)
    for key in sorted(seen.held):
        held, row = seen.held[key], known.get(key)
        count, newest = (held.error.letters, held.error.last_at) if held.error else (0, None)
        if row is None:
            kind, name, subject = key
            values = {
                "severity": held.severity,
                "worst": held.severity,
                "count": count,
                "newest_at": newest,
                "raised_at": now,
                "seen_at": now,
            }
            row, is_new = rows.get_or_create(kind=kind, name=name, subject=subject, defaults=values)
            if is_new:
                yield Change(row, held)
            continue
        same = rows.filter(pk=row.pk, severity=row.severity, count=row.count, newest_at=row.newest_at)
        if held.error is not None and row.newest_at is not None:
            has_more = count > row.count or held.error.last_at > row.newest_at
            # `raised_at` of an error is the time of its last report.
            if has_more and now - row.raised_at >= timedelta(seconds=REPEAT_SECONDS):
                if same.update(count=count, newest_at=newest, raised_at=now):
                    row.count, row.newest_at = count, newest
                    yield Change(row, held)
            elif count < row.count:
                same.update(count=count)
        elif held.severity != row.severity:
            grows = held.severity > row.severity
            if same.update(severity=held.severity, worst=Greatest(F("worst"), int(held.severity))) and grows:
                row.severity = held.severity
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


def _signal(change: Change) -> None:
    row, held = change.row, change.held
    severity = Severity(row.severity).name.lower()
    if row.kind == Kind.CONDITION and held is None:
        signals.send("condition_cleared", name=row.name, subject=row.subject, severity=severity, since=row.raised_at)
    elif row.kind == Kind.CONDITION and held is not None and held.condition is not None:
        signals.send(
            "condition_raised",
            name=row.name,
            subject=row.subject,
            severity=severity,
            text=held.condition.text,
            since=row.raised_at,
        )
    elif held is not None and held.transaction is not None:
        one = held.transaction
        signals.send(
            "transaction_parked",
            transaction_id=one.transaction_id,
            producer_group=get_settings().producer_group,
            topics=one.topics,
            key=one.key,
            checks=one.checks,
            last_answer=one.last_answer,
        )


def _reports(changes: Sequence[Change]) -> Iterator[notifications.Report]:
    """Fold the changes of one condition into one report.

    Dead letters are reported by their errors. Their condition is reported too if it is critical, because an error is a
    warning.
    """
    settings = get_settings()
    if settings.notify is None:
        return
    folded: dict[tuple[str, str], list[Change]] = {}
    for change in changes:
        row, is_over = change.row, change.held is None
        # Before its end, a critical condition may have become a warning.
        severity = Severity(max(row.worst, row.severity) if is_over else row.severity)
        by_condition = row.name != "dead_letters" or severity is Severity.CRITICAL or row.kind == Kind.ERROR
        is_wanted = _is_reported(row.name, severity, settings.notify.conditions)
        if row.kind in (Kind.CONDITION, Kind.ERROR) and by_condition and is_wanted:
            folded.setdefault((row.name, "cleared" if is_over else "raised"), []).append(change)
    for (name, event), of in folded.items():
        worst = Severity(max(change.row.severity for change in of))
        conditions = [change.held.condition for change in of if change.held and change.held.condition]
        kind = conditions[0] if conditions else Condition(name, worst)
        yield notifications.Report(
            event=event,
            name=name,
            severity=worst.name.lower(),
            meaning=kind.meaning,
            next_step=kind.next_step,
            facts=[_fact(change) for change in of],
        )


def _is_reported(name: str, severity: Severity, wanted: str | frozenset[str]) -> bool:
    return severity >= Severity[wanted.upper()] if isinstance(wanted, str) else name in wanted


def _fact(change: Change) -> str:
    error = change.held.error if change.held else None
    if error is None:
        return change.row.subject or change.row.name
    more = "at least " if error.is_cut else ""
    return f"group {error.group}: {more}{error.letters} dead letters, the newest: {error.example.splitlines()[0]}"
