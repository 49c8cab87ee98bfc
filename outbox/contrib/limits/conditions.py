"""The condition of the part `limits`: messages wait for the limits of their subscription."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from outbox.broker.operations.conditions import (
    OF_GROUP,
    Concern,
    Declarations,
    Judged,
    Place,
    Shown,
    Threshold,
    fact_of,
)
from outbox.broker.operations.state import BrokerState
from outbox.contrib.limits.operations import list_limits

CONDITIONS: Final = Declarations[BrokerState]()
LIMIT_SECONDS: Final = Threshold(
    "limit_seconds",
    600,
    None,
    "seconds",
    "time for which messages of a subscription have waited for a limit without a break",
)


@CONDITIONS.declare(
    meaning="Messages of a subscription have waited for one of its limits for long.",
    next_step="If the service behind the handler allows it, raise the limit with `outbox_group limits`.",
    concern=Concern.PASSING,
    thresholds=(LIMIT_SECONDS,),
    shown=Shown(
        listed=Place("groups", "Groups that wait for a limit", {"state": "=limited"}),
        settled=Place("group", "Change the limits …", OF_GROUP, "limits"),
        settles="waiting_for",
    ),
)
def limit_binding(state: BrokerState) -> Iterator[Judged]:
    for one in state.once(list_limits):
        since = one.waiting_seconds
        named = ("group", "topic", "waiting_for", "waiting")
        yield state.judge(LIMIT_SECONDS, since), fact_of(one, *named, limits=str(one.limits), since_seconds=since)
