"""The overview page: the verdict with its conditions and remedies, the figures of the broker, and diagrams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median
from typing import Final

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import reverse

from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement
from outbox.broker.operations.conditions import Condition, ConditionReport, Severity, as_facts, duration
from outbox.broker.operations.summary import KEPT_SECONDS, Overview
from outbox.contrib.console.access import seeing
from outbox.contrib.console.asking import reading, text
from outbox.contrib.console.cards import Tile, aged, cards, tone_of
from outbox.contrib.console.rendering import render
from outbox.contrib.console.signs import Signs, read_signs
from outbox.contrib.django.actions.cells import local
from outbox.contrib.django.operations.known_conditions import observer
from outbox.contrib.django.operations.watching import BrokerView, look

_OK: Final = "No fault"
_BEGINNING: Final = "A process has just begun to lead, so the figures are being counted"
# A count that is older than this multiple of its interval says nothing about the present.
_LATE: Final = 1.5
# If two summaries are further apart than this multiple of the usual interval, the diagrams show a gap between them.
_GAP: Final = 3.0
# The totals of a summary whose growth the diagrams show, beside that of the stored messages.
_TOTALS: Final = ("queued", "handled", "sent_back", "dead")
# Without a tick for longer than this, a broker that is led and in time is idle.
_IDLE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first line of the page. `severity` is ok, unknown, warning or critical.

    `at`: the time of the figures on which "No fault" is based. `why`: why nothing moves, although there is no fault, or
    which processes are silent beside the conditions.
    """

    severity: str
    sentence: str
    at: datetime | None = None
    why: str = ""

    @property
    def said(self) -> str:
        """What a screen reader announces when it changes: the sentence without the seconds in brackets."""
        return self.sentence.partition(" (")[0]


@seeing
def overview(request: HttpRequest) -> HttpResponse:
    """The overview page: the verdict, its conditions, and the broker's figures."""
    # The signs come first. If a process dies meanwhile, the next look at the signs reads the page again.
    signs = read_signs()
    found = look()
    if (server := observer()) is not None:
        return render(request, server.OVERVIEW_PAGE, _of_server(found))
    context = {
        "title": "Overview",
        "verdict": _judged(found, signs),
        "broker_notice": "",
        "signs": signs,
        "cards": cards(found.verdict.conditions),
        "tiles": list(_tiles(found.overview, found.verdict.conditions, signs)) if found.overview else [],
        "broker": found.overview,
        "counted_at": _moment(found.summary.at) if found.summary else None,
        "counts_every": found.summary.every_seconds if found.summary else None,
        "is_rejecting": any(one.name == "rejecting" for one in found.verdict.conditions),
    }
    return render(request, "overview", context)


def _judged(found: BrokerView, signs: Signs) -> Verdict:
    """The verdict. It is "No fault" only if every figure and every sign of life is as recent as its interval says."""
    if found.verdict.conditions:
        return Verdict(found.verdict.severity.name.lower(), _sentence(found.verdict), why=signs.doubt)
    if found.overview is None or found.summary is None:
        return Verdict("unknown", "The broker did not answer")
    if signs.doubt:
        return Verdict("unknown", signs.doubt)
    if not found.overview.is_current:
        return Verdict("unknown", _BEGINNING)
    if found.summary.age_seconds > _LATE * found.summary.every_seconds:
        return Verdict(
            "unknown",
            f"The figures are old ({duration(found.summary.age_seconds)}; the leader counts them every "
            f"{duration(found.summary.every_seconds)})",
        )
    return Verdict("ok", _OK, _moment(found.summary.at), _idle(found.overview, found.summary.age_seconds))


def _idle(broker: Overview, counted_seconds_ago: float) -> str:
    if broker.last_tick_seconds_ago <= _IDLE_SECONDS:
        return ""
    return (
        f"idle: no new message for {duration(broker.last_tick_seconds_ago)}; "
        f"the leader looked {duration(counted_seconds_ago)} ago"
    )


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


@seeing
def liveness(request: HttpRequest) -> JsonResponse:
    """What an open page asks every second: a text that differs if the page should be read again, and the time."""
    return JsonResponse({"state": read_signs().state, "at": f"{local(datetime.now(UTC)):%H:%M:%S}"})


def _of_server(found: BrokerView) -> dict[str, object]:
    """The context of the overview page of an observed server, whose figures differ from those of the bundled broker."""
    return {
        "title": "Overview",
        "verdict": Verdict(
            found.verdict.severity.name.lower(),
            _sentence(found.verdict),
            None if found.verdict.conditions else datetime.now(UTC),
        ),
        "conditions": [
            (one, one.severity.name.lower(), list(map(as_facts, one.evidence))) for one in found.verdict.conditions
        ],
        "server": found.server,
    }


# -- the diagrams -----------------------------------------------------------------------------------------

# The totals of all groups, and the figures of a group or of all groups together.
_HISTORY: Final = Statement("""
SELECT extract(epoch FROM at)::double precision,
       CASE WHEN %(group)s::text IS NULL THEN totals -> 'stored' END,
       CASE WHEN %(group)s::text IS NULL THEN totals -> 'queued' END,
       CASE WHEN %(group)s::text IS NULL THEN totals -> 'all' ELSE totals -> 'groups' -> %(group)s::text END
FROM {schema}.summary WHERE at > clock_timestamp() - make_interval(secs => %(kept)s) ORDER BY summary_id
""")
_CLOCK: Final = Statement("SELECT extract(epoch FROM clock_timestamp())::double precision")
_FIGURES: Final = ("handled", "sent_back", "dead", "lag", "oldest_seconds")


def summary_history(run: Executor, group: str | None = None) -> tuple[float, list[Row]]:
    """Return the time now, and a point per summary of the last KEPT_SECONDS, the oldest first.

    A point has the main figures of one group or of all groups together. The counters are totals. `stored` counts the
    assigned log ids: one for each stored message, and one for each insert that was rolled back. `stored` and `queued`
    are None for a single group. `oldest_seconds`: the waiting time of the oldest unfinished message; 0 if there is
    none. Neither `lag` nor `oldest_seconds` includes retries.
    """
    points = [
        Row(at=at, stored=stored, queued=queued, **dict(zip(_FIGURES, figures, strict=True)))
        for at, stored, queued, figures in run.rows(_HISTORY, {"group": group, "kept": KEPT_SECONDS})
        if figures
    ]
    return run.one(_CLOCK)[0], points


@seeing
def history(request: HttpRequest) -> HttpResponse:
    """The data of the diagrams as JSON, from `since` until `until`."""
    with reading() as run:
        now, points = summary_history(run, text(request.GET, "group"))
    pairs = list(_with_gaps(points))
    totals = {"published": "stored"} | {name: name for name in _TOTALS}
    return JsonResponse(
        {
            "since": now - KEPT_SECONDS,
            "until": now,
            "at": [after.at for _, after in pairs],
            **{name: [_rate(*pair, total) for pair in pairs] for name, total in totals.items()},
            "lag": [None if before is None else after.lag for before, after in pairs],
            "oldest": [None if before is None else round(after.oldest_seconds, 3) for before, after in pairs],
        }
    )


def _with_gaps(points: Sequence[Row]) -> Iterator[tuple[Row | None, Row]]:
    """The pairs of successive points; a pair with None where nothing was measured for long, so that there is a gap."""
    pairs = list(pairwise(points))
    usual = median(after.at - before.at for before, after in pairs) if pairs else 0.0
    for before, after in pairs:
        if after.at - before.at > usual * _GAP:
            yield None, Row(**{**vars(after), "at": before.at + usual})
        yield before, after


def _rate(before: Row | None, after: Row, name: str) -> float | None:
    if before is None:
        return None
    old, new = getattr(before, name), getattr(after, name)
    if old is None or new is None:
        return None
    # If a group or a topic was deleted, the newer total may be smaller.
    rate: float = round(max(0, new - old) / max(0.001, after.at - before.at), 3)
    return rate


def _sentence(verdict: ConditionReport) -> str:
    counts = {
        severity: sum(one.severity is severity for one in verdict.conditions)
        for severity in (Severity.CRITICAL, Severity.WARNING)
    }
    plural = {Severity.CRITICAL: "critical", Severity.WARNING: "warnings"}
    words = [f"{n} {plural[one] if n > 1 else one.name.lower()}" for one, n in counts.items() if n]
    return " and ".join(words) if words else _OK


# The tiles whose figures the leader counts.
_COUNTED: Final = ("Lag", "Undecided", "Dead letters", "Retrying")


def _tiles(broker: Overview, conditions: Sequence[Condition], signs: Signs) -> Iterator[Tile]:
    """The figures that an operator asks for first. Without a leader, old figures must not look like good ones."""
    for tile in _figures(broker, conditions):
        if tile.name in _COUNTED:
            yield aged(tile, broker)
        elif tile.name == "Workers" and tile.tone == "ok" and signs.doubt:
            yield replace(tile, tone="unknown")
        else:
            yield tile


def _figures(broker: Overview, conditions: Sequence[Condition]) -> Iterator[Tile]:
    groups = [one for one in broker.groups if not one.broadcast]
    oldest = max((one.oldest_seconds for one in groups if one.oldest_seconds is not None), default=None)
    behind = max(groups, key=lambda one: one.oldest_seconds or 0.0, default=None)
    yield Tile(
        "Lag",
        sum(one.lag for one in groups),
        f"the oldest waits for {duration(oldest)}, in {behind.name}" if oldest and behind else "no message waits",
        f"{reverse('outbox:groups')}?state=behind",
        tone_of(conditions, "Lag"),
    )
    parked = sum(one.parked for one in broker.topics)
    yield Tile(
        "Undecided",
        sum(one.undecided for one in broker.topics) + parked,
        f"{parked} of these transactions are parked" if parked else "no transaction is parked",
        reverse("outbox:undecided"),
        tone_of(conditions, "Undecided"),
    )
    dead = [one for one in broker.groups if one.dead]
    yield Tile(
        "Dead letters",
        sum(one.dead for one in dead),
        _among(dead, "dead") if dead else "none is unsettled",
        reverse("outbox:dead_letters"),
        tone_of(conditions, "Dead letters"),
    )
    retried = [one for one in broker.groups if one.retrying]
    yield Tile(
        "Retrying",
        sum(one.retrying for one in retried),
        _among(retried, "retrying") if retried else "no message is retried",
        f"{reverse('outbox:waiting')}?retrying=yes",
        tone_of(conditions, "Retrying"),
    )
    unattended = sum(1 for one in broker.groups if one.topics and not one.consumers)
    yield Tile(
        "Workers",
        broker.processes,
        f"{unattended} of {_groups(broker.groups)} without one" if unattended else f"for {_groups(broker.groups)}",
        reverse("outbox:workers"),
        tone_of(conditions, "Workers"),
    )
    yield Tile(
        "Sequencer",
        "leads" if broker.leader else "no leader",
        f"last tick {duration(broker.last_tick_seconds_ago)} ago"
        + (f", process {broker.leading.pid} on {broker.leading.host}" if broker.leading else ""),
        f"{reverse('outbox:workers')}",
        tone_of(conditions, "Sequencer"),
    )


def _among(groups: Sequence[Row], name: str) -> str:
    """The group that a figure is about, or that has most of it."""
    most = max(groups, key=lambda one: getattr(one, name)).name
    return f"in {most}" if len(groups) == 1 else f"in {len(groups)} groups, most in {most}"


def _groups(groups: Sequence[Row]) -> str:
    return "1 group" if len(groups) == 1 else f"{len(groups)} groups"
