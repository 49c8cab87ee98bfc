"""The tabs of the pages: one list per state, with the number of its messages or rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest
from django.urls import reverse

from outbox.broker.database.executor import Executor, Row
from outbox.broker.operations import summary
from outbox.broker.operations.liveness import leadership
from outbox.contrib.console.asking import text
from outbox.contrib.django.actions.listing import States


def state_tabs(run: Executor, group: str | None = None) -> list[Row]:
    """The tabs of all states. With `group`, retries and dead letters of this consumer group only.

    The counts come from the newest stored summary. Without a leader there are none (`count` is None), because they
    would not agree with the list.
    """
    counted = summary.stored(run) if leadership(run).leader else None
    rests = [one for one in counted.rests if group in (None, one.group)] if counted else []
    producers = counted.producers if counted else []

    def tab(name: str, label: str, page: str, count: int | None, **query: str | None) -> Row:
        given = urlencode({key: value for key, value in query.items() if value})
        url = f"{reverse(f'outbox:{page}')}?{given}".rstrip("?")
        return Row(name=name, label=label, url=url, count=count if counted else None)

    return [
        tab("all", "All", "search", None),
        tab("undecided", "Undecided", "undecided", sum(one.undecided for one in producers)),
        tab("parked", "Parked", "undecided", sum(one.parked for one in producers), parked="yes"),
        tab("delayed", "Delayed", "waiting", None, delayed="yes"),
        tab("retrying", "Retrying", "waiting", sum(one.retrying for one in rests), retrying="yes", group=group),
        tab("dead", "Dead", "dead_letters", sum(one.dead for one in rests), group=group),
    ]


def by_state(request: HttpRequest, rows: Iterable[Any], states: States) -> tuple[list[Any], str, list[Row]]:
    """Filter rows that are completely in memory by the parameter `state`; by default, the first state is chosen.

    Return the rows, the name of the chosen state, and the tabs.
    """
    found = list(rows)
    wanted = text(request.GET, "state") or ""
    chosen = wanted if wanted in states else next(iter(states))
    given = {name: value for name, value in request.GET.items() if name not in ("state", "after") and value}
    tabs = [
        Row(name=name, label=label, url=f"?{urlencode(given | state)}", count=sum(map(holds, found)))
        for name, (label, holds) in states.items()
        for state in [{"state": name} if name else {}]
    ]
    return list(filter(states[chosen][1], found)), chosen, tabs
