"""The metrics of limits: what holds now, what is in use, and what waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from outbox.broker.operations.state import BrokerState
from outbox.contrib.limits.operations import list_limits

_PAIR: Final = ("group", "topic")
METRICS: Final[Mapping[str, tuple[Sequence[str], str]]] = {
    "outbox_limit": ((*_PAIR, "limit"), "The limit of a subscription for all workers together."),
    "outbox_limit_in_use": (_PAIR, "Handler calls of a limited subscription that run now."),
    "outbox_limit_waiting_messages": (_PAIR, "Fetched messages that wait for a limit of their subscription."),
}


def figures(state: BrokerState) -> Iterator[tuple[str, Sequence[tuple[Sequence[str], float]]]]:
    """Yield the name of each metric with its rows: the values of the labels, and the value."""
    found = state.once(list_limits)
    yield (
        "outbox_limit",
        [
            ((one.group, one.topic, name), float(value))
            for one in found
            for name in ("running", "per_key", "per_second")
            if (value := getattr(one.limits, name)) is not None
        ],
    )
    yield "outbox_limit_in_use", [((one.group, one.topic), one.in_use) for one in found]
    yield "outbox_limit_waiting_messages", [((one.group, one.topic), one.waiting) for one in found]
