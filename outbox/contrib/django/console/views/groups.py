"""The pages of groups and topics: a group's progress and processes, and the reason why a queue waits."""

from __future__ import annotations

from typing import Final

from django.http import HttpRequest, HttpResponse

from outbox.broker.log.topics import list_topics
from outbox.broker.operations import summary
from outbox.broker.operations.listings import group_now, list_consumers
from outbox.broker.operations.progress import list_queues
from outbox.contrib.django.console.access import seeing
from outbox.contrib.django.console.asking import number, reading, required, text
from outbox.contrib.django.console.rendering import PER_PAGE, Page, Row, paged, render
from outbox.errors import UnknownTopic

_CONSUMERS: Final = 200


@seeing
def groups(request: HttpRequest) -> HttpResponse:
    """The page of all groups. The figures come from the stored summary."""
    with reading() as run:
        found = summary.overview(run, summary.read(run))
    page = _slice(request, [one for one in found.groups if (text(request.GET, "q") or "") in one.name])
    return render(request, "groups", {"title": "Groups", "page": page, "broker": found, "given": request.GET})


@seeing
def group(request: HttpRequest) -> HttpResponse:
    """The page of one group: its topics, its consumer processes, and the queues of one of its topics."""
    name, topic = required(request.GET, "name"), text(request.GET, "topic")
    with reading() as run:
        counted = summary.read(run)
        places = [one for one in counted.groups if one.group == name and not one.is_retry]
        topic = topic or (places[0].topic if len(places) == 1 else None)
        now = group_now(run, name)
        consumers = list_consumers(run, name, limit=_CONSUMERS + 1)
        queues = list_queues(run, name, topic) if topic else []
    context = {
        "title": f"Group {name}",
        "name": name,
        "group": now,
        "rest": next((one for one in counted.rests if one.group == name), None),
        "topics": _slice(request, places),
        "at": counted.at,
        "counted": counted,
        "consumers": consumers[:_CONSUMERS],
        "more_consumers": len(consumers) > _CONSUMERS,
        "queues": queues,
        "topic": topic,
    }
    return render(request, "group", context)


@seeing
def topics(request: HttpRequest) -> HttpResponse:
    """The page of all topics. The figures come from the stored summary."""
    with reading() as run:
        counted = summary.read(run)
    page = _slice(request, [one for one in counted.topics if (text(request.GET, "q") or "") in one.topic])
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
        "groups": _slice(request, [one for one in counted.groups if one.topic == name and not one.is_retry]),
        "counted": counted,
    }
    return render(request, "topic", context)


def _slice(request: HttpRequest, rows: list[Row]) -> Page[Row]:
    """One page of a list that is completely in memory."""
    begin = number(request.GET, "after") or 0
    return paged(request, rows[begin : begin + PER_PAGE + 1], lambda _: {"after": begin + PER_PAGE})
