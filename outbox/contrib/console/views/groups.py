"""The pages of groups and topics: a group's health and processes, and the reason why a queue waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from django.http import HttpRequest, HttpResponse

from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import list_topics
from outbox.broker.operations import summary
from outbox.broker.operations.broker_conditions import waits
from outbox.broker.operations.conditions import Counted
from outbox.broker.operations.listings import group_now, list_errors, list_processes
from outbox.broker.operations.progress import list_queues
from outbox.broker.operations.state import BrokerState
from outbox.broker.operations.summary import GroupOverview, Summary
from outbox.contrib.console.access import seeing
from outbox.contrib.console.asking import application, reading, required, text
from outbox.contrib.console.cards import cards
from outbox.contrib.console.rendering import render, sliced
from outbox.contrib.console.signs import read_signs
from outbox.contrib.django.actions.cells import badge, group_link, html, link, span, topic_link, words
from outbox.contrib.django.actions.declaration import Field
from outbox.contrib.django.actions.listing import Asked, Button, Column, Listing, States, actions
from outbox.contrib.django.catalogue import ACTIONS
from outbox.contrib.django.operations.known_conditions import application_conditions
from outbox.contrib.django.operations.watching import look
from outbox.errors import UnknownTopic

_CONSUMERS: Final = 50
_ERRORS: Final = 5


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A row of the list of groups. `waits_for`: what its messages wait for, as a part says; '' if they do not wait."""

    group: GroupOverview
    is_disabled: bool
    waits_for: str


def _read_groups(run: Executor, asked: Asked) -> list[GroupRow]:
    counted = summary.read(run)
    found = summary.overview(run, counted).groups
    with asked.application():
        rows = _rows(run, counted, [one for one in found if (asked["q"] or "") in one.name])
    if asked["state"] == "behind":
        # Otherwise the order is by name, so that a refresh moves no row under the pointer.
        rows.sort(key=lambda row: (-(row.group.oldest_seconds or 0.0), row.group.name))
    return rows


def _rows(run: Executor, counted: Summary, groups: Sequence[GroupOverview]) -> list[GroupRow]:
    waiting: dict[str, set[str]] = {}
    for (group, _), fact in waits(run).items():
        waiting.setdefault(group, set()).add(str(fact["waiting_for"]))
    disabled = _disabled(BrokerState(run, counted))
    return [GroupRow(one, one.name in disabled, ", ".join(sorted(waiting.get(one.name, ())))) for one in groups]


def _disabled(state: BrokerState) -> set[object]:
    """The groups whose endpoint is disabled. A part has the condition that names them."""
    declared = application_conditions().get("endpoint_disabled")
    found = declared.rule(state) if declared and declared.rule else ()
    return {fact["group"] for _, fact in (found.judged if isinstance(found, Counted) else found)}


def _counted(run: Executor, asked: Asked, rows: Sequence[object]) -> Mapping[str, object]:
    return {"counted_seconds_ago": summary.read(run).age_seconds}


def _state(row: GroupRow) -> list[object]:
    one = row.group
    said: list[object] = []
    if one.paused:
        said.append(badge("paused", "warn"))
    if row.is_disabled:
        said.append(link(badge("endpoint disabled", "bad"), "endpoints", state="disabled"))
    if row.waits_for:
        said.append(badge(f"waits for its {words(row.waits_for)}", "warn"))
    said += [
        badge(f"{count} {word}", "bad") for count, word in ((one.blocked, "blocked"), (one.stopped, "stopped")) if count
    ]
    if not one.consumers and one.topics:
        said.append(badge("no workers", "bad"))
    return [*(said or [badge("running")]), *([badge("broadcast")] if one.broadcast else [])]


def _switch(row: GroupRow) -> Button:
    one = row.group
    if one.paused or one.stopped:
        return Button("resume", "Resume …", "good", {"group": one.name})
    return Button("pause", "Pause …", fields={"group": one.name})


def _linked(page: str, name: str, **query: str) -> Callable[[GroupRow], object]:
    """A count with a link to the list of what it counts; a zero has no link."""

    def cell(row: GroupRow) -> object:
        count = getattr(row.group, name)
        return link(count, page, **query, group=row.group.name) if count else 0

    return cell


# The states by which the list of groups can be filtered: the label and the condition of each state.
_STATES: Final[States] = {
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
_NAME_CONTAINS: Final = (Field("q", "only those whose name contains this", label="Name contains"),)
GROUPS: Final = Listing(
    "groups",
    (
        Column("Group", lambda row: group_link(row.group.name), "head"),
        Column("Topics", lambda row: row.group.topics, "number"),
        Column("Workers", _linked("workers", "consumers"), "number"),
        Column("Lag", lambda row: None if row.group.broadcast else row.group.lag, "number"),
        Column("Oldest waits", lambda row: span(row.group.oldest_seconds), "number"),
        Column("Handled", lambda row: row.group.handled, "number"),
        Column("Claimed", lambda row: row.group.claimed, "number"),
        Column("Retrying", _linked("waiting", "retrying", retrying="yes"), "number"),
        Column("Dead", _linked("dead_letters", "dead"), "number"),
        Column("State", _state),
        actions(_switch),
    ),
    _read_groups,
    fields=_NAME_CONTAINS,
    states=_STATES,
    address="groups/",
    title="Groups",
    caption="Consumer groups",
    empty="No group matches.",
    key=lambda row: row.group.name,
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
        sections = list(_sections(run, name, topic)) if topic else []
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
            yield {"action": action, "section": section, "told": html(told), "present": present}


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
