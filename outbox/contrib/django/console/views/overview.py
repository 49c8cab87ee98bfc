"""The overview page: the verdict with its evidence, the figures of the broker, and diagrams of the last 15 minutes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import reverse

from outbox.broker.operations import summary
from outbox.broker.operations.conditions import Condition, ConditionReport, Fact, Severity, duration
from outbox.broker.operations.summary import SummaryPoint
from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.asking import as_uuid, reading, text
from outbox.contrib.django.console.rendering import render
from outbox.contrib.django.operations.watching import look

# The page for a condition: its URL name, its parameters, and the text of the link.
_PLACES: Final[Mapping[str, tuple[str, str, str]]] = {
    "unanswered": ("undecided", "", "Undecided transactions"),
    "check_back_late": ("undecided", "", "Undecided transactions"),
    "parked": ("undecided", "parked=yes", "Parked transactions"),
    "dead_letters": ("dead_letters", "", "Dead letters by error"),
    "retry_storm": ("waiting", "", "What is retried"),
    **dict.fromkeys(("contradicted", "refused", "wrong_ledger", "checker_disagrees", "expired", "path_flipped",
                     "process_failing"),
                    ("incidents", "", "Incidents")),
    **dict.fromkeys(("no_worker", "lag", "blocked_queue", "stopped_queue", "group_paused", "outage", "suspects",
                     "hung_handlers", "crash_loop"), ("groups", "", "Groups")),
    "retention_behind": ("topics", "", "Topics"),
}  # fmt: skip

_OK: Final = "Everything is in order"


@dataclass(frozen=True, slots=True)
class EvidenceItem:
    """One fact of a condition's evidence, with a link to a page."""

    name: str
    value: str
    url: str


@dataclass(frozen=True, slots=True)
class ConditionCard:
    """A condition as the overview page shows it."""

    condition: Condition
    severity: str
    clues: list[list[EvidenceItem]]
    url: str
    link: str


@seeing
def overview(request: HttpRequest) -> HttpResponse:
    """The overview page: the verdict, its conditions, and the broker's figures."""
    found = look()
    context = {
        "title": "Overview",
        "severity": found.verdict.severity.name.lower(),
        "sentence": _sentence(found.verdict),
        "conditions": [_shown(one) for one in found.verdict.conditions],
        "broker": found.overview,
        "is_rejecting": any(one.name == "rejecting" for one in found.verdict.conditions),
    }
    return render(request, "overview", context)


@seeing
def history(request: HttpRequest) -> HttpResponse:
    """The data of the diagrams as JSON, for the last 15 minutes.

    The data contain the messages per second and the age of the oldest waiting message.
    """
    with reading() as run:
        moments = summary.history(run, text(request.GET, "group"))
    pairs = list(pairwise(moments))
    return JsonResponse(
        {
            "at": [after.at for _, after in pairs],
            "published": [_rate(before, after, "stored") for before, after in pairs],
            "queued": [_rate(before, after, "queued") for before, after in pairs],
            "handled": [_rate(before, after, "handled") for before, after in pairs],
            "sent_back": [_rate(before, after, "sent_back") for before, after in pairs],
            "dead": [_rate(before, after, "dead") for before, after in pairs],
            "lag": [after.lag for _, after in pairs],
            "oldest": [round(after.oldest_seconds, 3) for _, after in pairs],
        }
    )


def _rate(before: SummaryPoint, after: SummaryPoint, name: str) -> float | None:
    old, new = getattr(before, name), getattr(after, name)
    if old is None or new is None:
        return None
    # If a group or a topic was deleted, the newer total may be smaller than the older total. In this case the rate is
    # 0.
    return round(float(max(0, new - old)) / max(0.001, after.at - before.at), 3)


def _sentence(verdict: ConditionReport) -> str:
    counts = {
        severity: sum(one.severity is severity for one in verdict.conditions)
        for severity in (Severity.CRITICAL, Severity.WARNING)
    }
    words = [f"{count} {_plural(severity.name.lower(), count)}" for severity, count in counts.items() if count]
    return " and ".join(words) if words else _OK


def _plural(word: str, count: int) -> str:
    return "warnings" if word == "warning" and count > 1 else word


def _shown(condition: Condition) -> ConditionCard:
    page, query, link = _PLACES.get(condition.name, ("", "", ""))
    url = f"{reverse(f'outbox:{page}')}?{query}".rstrip("?") if page else ""
    return ConditionCard(
        condition, condition.severity.name.lower(), [list(_clues(fact)) for fact in condition.evidence], url, link
    )


def _clues(fact: Fact) -> Iterator[EvidenceItem]:
    for name, value in fact.items():
        if value in (None, ""):
            continue
        is_span = name.endswith("seconds") and isinstance(value, (int, float))
        shown = duration(float(value)) if is_span and value is not None else str(value)
        yield EvidenceItem(name.removesuffix("_seconds").replace("_", " "), shown, _url(name, str(value)))


def _url(name: str, value: str) -> str:
    if name in ("group", "topic"):
        return f"{reverse(f'outbox:{name}')}?{urlencode({'name': value})}"
    if name == "producer_group":
        return f"{reverse('outbox:undecided')}?{urlencode({'group': value})}"
    if name in ("message", "transaction", "subject", "transactions") and (found := as_uuid(value)) is not None:
        return reverse("outbox:message", args=[found])
    return ""
