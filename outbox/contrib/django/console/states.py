"""The tabs above the lists of messages: one list per state, with the number of its messages."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlencode

from django.urls import reverse

from outbox.broker.database.executor import Executor
from outbox.broker.operations import summary


@dataclass(frozen=True, slots=True)
class StateTab:
    """One state with the address of its list. `count` is None if the summary does not count the state."""

    name: str
    label: str
    url: str
    count: int | None


def state_tabs(run: Executor, group: str | None = None) -> list[StateTab]:
    """The tabs of all states. With `group`, retries and dead letters of this consumer group only.

    The counts come from the newest stored summary, so that a list never waits for a count.
    """
    counted = summary.stored(run)
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
