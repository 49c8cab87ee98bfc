"""The metric of schedules: how late each is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from outbox.broker.operations.state import BrokerState
from outbox.contrib.schedules.schedule import clock, list_schedules

METRICS: Final[Mapping[str, tuple[Sequence[str], str]]] = {
    "outbox_schedule_late_seconds": (
        ("producer_group", "schedule"),
        "Seconds since the first due moment without a message; 0 while no due moment has passed.",
    ),
}


def figures(state: BrokerState) -> Iterator[tuple[str, Sequence[tuple[Sequence[str], float]]]]:
    """Yield the name of each metric with its rows: the values of the labels, and the value."""
    now = clock(state.run)
    rows = [((one.producer_group, one.name), one.late_seconds(now)) for one in list_schedules(state.run)]
    yield "outbox_schedule_late_seconds", rows
