"""The tabs of the pages: one list per state, with the number of its messages or rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest
from django.urls import reverse

from outbox.broker.database.executor import Executor
from outbox.broker.operations import summary
from outbox.broker.operations.liveness import leadership
from outbox.contrib.console.asking import text
from outbox.contrib.django.actions.listing import States


@dataclass(frozen=True, slots=True)
class StateTab:
    """One state with the address of its list. `count` is None if the summary does not count the state."""

    name: str
    label: str
    url: str
    count: int | None


def state_tabs(run: Executor, group: str | None = None) -> list[StateTab]:
    """The tabs of all states. With `group`, retries and dead letters of this consumer group only.

    The counts come from the newest stored summary, so that a list never waits for a count. Without a leader there are
    no counts, because they would not agree with the list.
    """
    counted = summary.stored(run) if leadership(run).leader else None
    rests = [one for one in counted.rests if group in (None, one.group)] if counted else []
    producers = counted.producers if counted else []

    def tab(name: str, label: str, page: str, count: int | None, **query: str | None) -> StateTab:
        given = urlencode({key: value for key, value in query.items() if value})
        return StateTab(name, label, f"{reverse(f'outbox:{page}')}?{given}".rstrip("?"), count if counted else None)

    return [
        tab("all", "All", "search", None),
        tab("undecided", "Undecided", "undecided", sum(one.undecided for one in producers)),
        tab("parked", "Parked", "undecided", sum(one.parked for one in producers), parked="yes"),
        tab("delayed", "Delayed", "waiting", None, delayed="yes"),
        tab("retrying", "Retrying", "waiting", sum(one.retrying for one in rests), retrying="yes", group=group),
        tab("dead", "Dead", "dead_letters", sum(one.dead for one in rests), group=group),
    ]


def by_state(request: HttpRequest, rows: Iterable[Any], states: States) -> tuple[list[Any], str, list[StateTab]]:
    """Filter rows that are completely in memory by the parameter `state`.

    The first of the states is used if the parameter names none of them. Return the rows, the name of the chosen state,
    and the tabs. Other parameters of the address stay as they are.
    """
    found = list(rows)
    wanted = text(request.GET, "state") or ""
    chosen = wanted if wanted in states else next(iter(states))
    given = {name: value for name, value in request.GET.items() if name not in ("state", "after") and value}
    tabs = [
        StateTab(name, label, "?" + urlencode(given | ({"state": name} if name else {})), sum(map(holds, found)))
        for name, (label, holds) in states.items()
    ]
    return list(filter(states[chosen][1], found)), chosen, tabs
