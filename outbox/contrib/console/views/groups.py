"""The pages of groups and topics: a group's health and processes, and the reason why a queue waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from django.http import HttpRequest, HttpResponse

from outbox.broker.database.executor import Executor, Row
from outbox.broker.log.topics import list_topics
from outbox.broker.operations import summary
from outbox.broker.operations.broker_conditions import outages, retried_errors, waits
from outbox.broker.operations.listings import group_now, list_processes
from outbox.broker.operations.progress import list_queues
from outbox.broker.operations.summary import Summary
from outbox.contrib.console.access import seeing
from outbox.contrib.console.asking import application, reading, required, text
from outbox.contrib.console.cards import cards
from outbox.contrib.console.rendering import render, sliced
from outbox.contrib.console.signs import read_signs
from outbox.contrib.console.views.dead_letters import list_errors
from outbox.contrib.django.actions.cells import badge, group_link, html, link, span, topic_link, words
from outbox.contrib.django.actions.declaration import Field
from outbox.contrib.django.actions.listing import Asked, Column, Listing, States
from outbox.contrib.django.catalogue import ACTIONS
from outbox.contrib.django.operations.watching import look
from outbox.errors import UnknownTopic

_CONSUMERS: Final = 50
_ERRORS: Final = 5


def _read_groups(run: Executor, asked: Asked) -> list[Row]:
    counted = summary.read(run)
    found = summary.overview(run, counted).groups
    with asked.application():
        rows = _rows(run, counted, [one for one in found if (asked["q"] or "") in one.name])
    if asked["state"] == "behind":
        # Otherwise the order is by name, so that a refresh moves no row under the pointer.
        rows.sort(key=lambda row: (-(row.oldest_seconds or 0.0), row.name))
    return rows


def _rows(run: Executor, counted: Summary, groups: Sequence[Row]) -> list[Row]:
    """The rows of the list. `waits_for`: what the messages of a group wait for, as a part says."""
    waiting: dict[str, set[str]] = {}
    for (group, _), fact in waits(run).items():
        waiting.setdefault(group, set()).add(str(fact["waiting_for"]))
    paused = {one["group"] for one in outages(run)}
    return [
        Row(
            **vars(one),
            waits_for=", ".join(sorted(waiting.get(one.name, ()))),
            is_outage=one.name in paused,
        )
        for one in groups
    ]


def _counted(run: Executor, asked: Asked, rows: Sequence[object]) -> Mapping[str, object]:
    return {"counted_seconds_ago": summary.read(run).age_seconds}


def _state(row: Row) -> list[object]:
    said: list[object] = []
    if row.paused:
        said.append(badge("paused", "warn"))
    if row.is_outage:
        said.append(badge("outage", "bad"))
    elif row.retrying:
        said.append(badge("retrying", "warn"))
    if row.waits_for:
        said.append(badge(f"waits for its {words(row.waits_for)}", "warn"))
    said += [
        badge(f"{count} {word}", "bad") for count, word in ((row.blocked, "blocked"), (row.stopped, "stopped")) if count
    ]
    if not row.consumers and row.topics:
        said.append(badge("no workers", "bad"))
    return [*(said or [badge("running")]), *([badge("broadcast")] if row.broadcast else [])]


def _linked(page: str, name: str, **query: str) -> Callable[[Row], object]:
    """A count with a link to the list of what it counts; a zero has no link."""

    def cell(row: Row) -> object:
        count = getattr(row, name)
        return link(count, page, **query, group=row.name) if count else 0

    return cell


_STATES: Final[States] = {
    "": ("All", lambda row: True),
    "behind": ("Behind", lambda row: row.lag > 0),
    "failing": ("Failing", lambda row: row.blocked > 0 or row.retrying > 0 or row.is_outage),
    "stopped": ("Stopped", lambda row: row.stopped > 0),
    "paused": ("Paused", lambda row: row.paused),
    "limited": ("At a limit", lambda row: bool(row.waits_for)),
    "dead": ("Dead letters", lambda row: row.dead > 0),
    "unattended": ("No workers", lambda row: row.topics > 0 and not row.consumers),
}
_NAME_CONTAINS: Final = (Field("q", "only those whose name contains this", label="Name contains"),)
GROUPS: Final = Listing(
    "groups",
    (
        Column("Group", lambda row: group_link(row.name), "head"),
        Column("Topics", "topics", "number"),
        Column("Workers", _linked("workers", "consumers"), "number"),
        Column("Lag", lambda row: None if row.broadcast else row.lag, "number"),
        Column("Oldest waits", lambda row: span(row.oldest_seconds), "number"),
        Column("Handled", "handled", "number"),
        Column("Claimed", "claimed", "number"),
        Column("Retrying", _linked("waiting", "retrying", retrying="yes"), "number"),
        Column("Dead", _linked("dead_letters", "dead"), "number"),
        Column("State", _state),
    ),
    _read_groups,
    fields=_NAME_CONTAINS,
    states=_STATES,
    address="groups/",
    title="Groups",
    caption="Consumer groups",
    empty="No group matches.",
    key=lambda row: row.name,
    notes=_counted,
    is_live=True,
)


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
        place = (name, topic)
        outage = next((one for one in outages(run) if (one["group"], one["topic"]) == place), None)
        retried = next((one for one in retried_errors(run) if (one["group"], one["topic"]) == place), None)
        # Those that only act come after those that also tell something.
        sections = sorted(_sections(run, name, topic), key=lambda one: not one["told"]) if topic else []
        rest = next((one for one in counted.rests if one.group == name), None)
        dead = list_errors(run, name) if rest is None or rest.dead else []
        figures = [one for one in found.overview.groups if one.name == name] if found.overview else []
        with application():
            rows = _rows(run, counted, figures)
    found_cards = cards(found.verdict.conditions, group=name)
    context = {
        "title": f"Group {name}",
        "name": name,
        "group": now,
        "rest": rest,
        "cards": found_cards,
        "listing": GROUPS,
        "rows": rows,
        "is_healthy": not found_cards and not signs.doubt and found.overview is not None and found.overview.is_current,
        "signs": signs,
        "said": _sentence(len(found_cards)),
        "dead_errors": dead[:_ERRORS],
        "topics": sliced(request, places),
        "counted": counted,
        "consumers": consumers[:_CONSUMERS],
        "more_consumers": len(consumers) > _CONSUMERS,
        "queues": queues,
        "outage": outage,
        "retried": retried,
        "topic": topic,
        "sections": sections,
    }
    return render(request, "group", context)


def _sections(run: Executor, group: str, topic: str) -> Iterator[Mapping[str, object]]:
    """What declared actions show on the page of a group, each with the values of its form."""
    for action in ACTIONS.values():
        section = action.section
        if section is not None and (found := section.read(run, group, topic)) is not None:
            told, present = found
            yield {"action": action, "section": section, "told": told and html(told), "present": present}


def _sentence(count: int) -> str:
    if not count:
        return "No condition names this group"
    return "1 condition names this group" if count == 1 else f"{count} conditions name this group"


TOPICS: Final = Listing(
    "topics",
    (
        Column("Topic", lambda one: topic_link(one.topic), "head"),
        Column("Queues", "queues", "number"),
        Column("Ever queued", "queued", "number"),
        Column("Undecided", "undecided", "number"),
        Column("Parked", "parked", "number"),
        Column("Held", "held", "number"),
    ),
    lambda run, asked: [one for one in summary.read(run).topics if (asked["q"] or "") in one.topic],
    fields=_NAME_CONTAINS,
    address="topics/",
    title="Topics",
    caption="Topics",
    empty="No topic of that name is declared.",
    key=lambda one: one.topic,
    notes=_counted,
    is_live=True,
)


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
