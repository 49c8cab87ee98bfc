"""The pages of groups and topics: a group's health and processes, and the reason why a queue waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from outbox.broker.log.topics import list_topics
from outbox.broker.operations import summary
from outbox.broker.operations.conditions import Condition, duration
from outbox.broker.operations.limits import SubscriptionLimits, list_limits
from outbox.broker.operations.listings import Group, group_now, list_errors, list_processes, list_retry_errors
from outbox.broker.operations.progress import QueueProgress, list_queues
from outbox.broker.operations.summary import GroupOverview, GroupProgress
from outbox.contrib.django.actions.groups import present_limits
from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.asking import application, reading, required, text
from outbox.contrib.django.console.cards import ConditionCard, Tile, aged, cards, tone_of
from outbox.contrib.django.console.readable import retried_topic, words
from outbox.contrib.django.console.rendering import render, sliced
from outbox.contrib.django.console.signs import read_signs
from outbox.contrib.django.console.spans import chosen_span, span_tabs
from outbox.contrib.django.console.states import by_state
from outbox.contrib.django.operations.endpoints import list_endpoints
from outbox.contrib.django.operations.watching import look
from outbox.errors import UnknownTopic

_CONSUMERS: Final = 50
_ERRORS: Final = 5


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A row of the list of groups. `waits_for`: the limit for which its messages wait; '' if they wait for none."""

    group: GroupOverview
    is_disabled: bool
    waits_for: str


# The states by which the list of groups can be filtered: the label and the condition of each state.
_STATES: Final[Mapping[str, tuple[str, Callable[[GroupRow], bool]]]] = {
    "": ("All", lambda row: True),
    "behind": ("Behind", lambda row: row.group.lag > 0),
    "failing": ("Failing", lambda row: row.group.blocked > 0 or row.group.retrying > 0),
    "stopped": ("Stopped", lambda row: row.group.stopped > 0),
    "paused": ("Paused", lambda row: row.group.paused),
    "limited": ("Limited", lambda row: bool(row.waits_for)),
    "disabled": ("Disabled", lambda row: row.is_disabled),
    "dead": ("Dead letters", lambda row: row.group.dead > 0),
    "unattended": ("No workers", lambda row: row.group.topics > 0 and not row.group.consumers),
}


@seeing
def groups(request: HttpRequest) -> HttpResponse:
    """The page of all groups, or of the groups in one state. The figures come from the stored summary."""
    wanted = text(request.GET, "q") or ""
    with reading() as run:
        found = summary.overview(run, summary.read(run))
        waiting: dict[str, set[str]] = {}
        for limits in list_limits(run):
            if limits.waiting_for:
                waiting.setdefault(limits.group, set()).add(limits.waiting_for)
    with application():
        disabled = {one.group for one in list_endpoints() if one.disabled_at is not None}
    every = [
        GroupRow(one, one.name in disabled, ", ".join(sorted(waiting.get(one.name, ()))))
        for one in found.groups
        if wanted in one.name
    ]
    rows, state, tabs = by_state(request, every, _STATES)
    if state == "behind":
        # Otherwise the order is by name, so that a refresh moves no row under the pointer.
        rows.sort(key=lambda row: (-(row.group.oldest_seconds or 0.0), row.group.name))
    context = {
        "title": "Groups",
        "page": sliced(request, rows),
        "broker": found,
        "given": request.GET,
        "state": state,
        "tabs": tabs,
    }
    return render(request, "groups", context)


@seeing
def group(request: HttpRequest) -> HttpResponse:
    """The page of one group: its health, its errors, its topics, its processes, and the queues of one of its topics."""
    name, topic = required(request.GET, "name"), text(request.GET, "topic")
    signs = read_signs()
    # All figures but those of single queues come from the summary of the conditions, so that they agree.
    found = look()
    with reading() as run:
        counted = found.summary or summary.read(run)
        places = [one for one in counted.groups if one.group == name and not one.is_retry]
        topic = topic or (places[0].topic if len(places) == 1 else None)
        now = group_now(run, name)
        consumers = list_processes(run, name, limit=_CONSUMERS + 1)
        queues = list_queues(run, name, topic) if topic else []
        limits = next((one for one in list_limits(run, name) if one.topic == topic), None)
        rest = next((one for one in counted.rests if one.group == name), None)
        dead = list_errors(run, name) if rest is None or rest.dead else []
        retrying = list_retry_errors(run, name) if rest is None or rest.retrying else []
    with application():
        is_disabled = any(one.group == name and one.disabled_at is not None for one in list_endpoints())
    figures = next((one for one in found.overview.groups if one.name == name), None) if found.overview else None
    found_cards = cards(found.verdict.conditions, group=name)
    context = {
        "title": f"Group {name}",
        "name": name,
        "group": now,
        "rest": rest,
        "cards": found_cards,
        "tiles": [
            aged(tile, found.overview) if tile.name != "Workers" else tile
            for tile in _tiles(figures, places, [card.condition for card in found_cards])
        ]
        if figures and found.overview
        else [],
        "is_healthy": not found_cards and not signs.doubt and found.overview is not None and found.overview.is_current,
        "signs": signs,
        "said": _sentence(len(found_cards)),
        "dead_errors": dead[:_ERRORS],
        "retry_errors": retrying[:_ERRORS],
        "topics": sliced(request, places),
        "at": counted.at,
        "counted": counted,
        "consumers": consumers[:_CONSUMERS],
        "more_consumers": len(consumers) > _CONSUMERS,
        "queues": [(one, list(_holding(one, now, limits, found_cards, is_disabled=is_disabled))) for one in queues],
        "topic": topic,
        "limits": limits,
        "present_limits": present_limits(limits) if limits else {},
        "span": chosen_span(request),
        "spans": span_tabs(request, chosen_span(request)),
    }
    return render(request, "group", context)


# The conditions that hold up the queues of a group, and what the table of queues says of each.
_HOLDING: Final = {
    "no_worker": "no worker",
    "outage": "outage of a service",
    "unknown_version": "needs newer code",
    "hung_handlers": "handler hangs",
}


def _holding(
    queue: QueueProgress,
    group: Group,
    limits: SubscriptionLimits | None,
    cards: Sequence[ConditionCard],
    *,
    is_disabled: bool,
) -> Iterator[str]:
    """Why the messages of a queue wait, apart from an error of its next message."""
    if group.paused:
        yield "group paused"
    if is_disabled:
        yield "endpoint disabled"
    if not queue.lag:
        return
    if limits is not None and limits.waiting_for:
        yield f"{words(limits.waiting_for)} limit"
    topic = retried_topic(queue.topic)
    for card in cards:
        said = _HOLDING.get(card.condition.name)
        if said and any(fact.get("topic") in (None, topic) for fact in card.condition.evidence):
            yield said


def _sentence(count: int) -> str:
    if not count:
        return "No condition names this group"
    return "1 condition names this group" if count == 1 else f"{count} conditions name this group"


def _tiles(group: GroupOverview, places: Sequence[GroupProgress], conditions: Sequence[Condition]) -> Iterator[Tile]:
    """The health of a group in figures."""
    of_group = urlencode({"group": group.name})
    here = f"{reverse('outbox:group')}?{urlencode({'name': group.name})}"

    def queues(counts: Callable[[GroupProgress], int]) -> str:
        topic = next((one.topic for one in places if counts(one)), None)
        return f"{here}&{urlencode({'topic': topic})}#queues" if topic else f"{here}#topics"

    if not group.broadcast:
        oldest = group.oldest_seconds
        yield Tile(
            "Lag",
            group.lag,
            f"the oldest waits for {duration(oldest)}" if oldest is not None else "no message waits",
            f"{here}#topics",
            tone_of(conditions, "lag", "group_paused"),
        )
    yield Tile(
        "Failing queues",
        group.blocked,
        "their next message fails" if group.blocked else "no queue is blocked",
        queues(lambda one: one.blocked),
        tone_of(conditions, "blocked_queue"),
    )
    yield Tile(
        "Stopped queues",
        group.stopped,
        "by an on_error policy" if group.stopped else "no queue is stopped",
        queues(lambda one: one.stopped),
        tone_of(conditions, "stopped_queue"),
    )
    yield Tile(
        "Retrying",
        group.retrying,
        "wait for another attempt" if group.retrying else "no message is retried",
        f"{reverse('outbox:waiting')}?retrying=yes&{of_group}",
        tone_of(conditions, "retry_storm", "outage"),
    )
    yield Tile(
        "Dead letters",
        group.dead,
        "not settled yet" if group.dead else "none is unsettled",
        f"{reverse('outbox:dead_letters')}?{of_group}",
        tone_of(conditions, "dead_letters"),
    )
    yield Tile(
        "Workers",
        group.consumers,
        "live processes" if group.consumers else "no process runs",
        f"{reverse('outbox:workers')}?{of_group}",
        tone_of(conditions, "no_worker", "quarantined", "hung_handlers"),
    )


@seeing
def topics(request: HttpRequest) -> HttpResponse:
    """The page of all topics. The figures come from the stored summary."""
    with reading() as run:
        counted = summary.read(run)
    page = sliced(request, [one for one in counted.topics if (text(request.GET, "q") or "") in one.topic])
    return render(request, "topics", {"title": "Topics", "page": page, "counted": counted, "given": request.GET})


@seeing
def topic(request: HttpRequest) -> HttpResponse:
    """The page of one topic: its declaration, and the groups that consume it."""
    name = required(request.GET, "name")
    with reading() as run:
        counted = summary.read(run)
        declared = {one.name: one for one in list_topics(run)}
    if name not in declared:
        raise UnknownTopic(f"topic {name!r} is not declared.")
    context = {
        "title": f"Topic {name}",
        "name": name,
        "declared": declared[name],
        "types": sorted(map(str, declared[name].types)),
        "progress": next((one for one in counted.topics if one.topic == name), None),
        "groups": sliced(request, [one for one in counted.groups if one.topic == name and not one.is_retry]),
        "counted": counted,
    }
    return render(request, "topic", context)
