"""The condition of the part `blocked_keys`: messages wait for a dead letter of their key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from outbox.broker.operations.conditions import BY_ERROR, Concern, Declarations, Judged, Shown, Threshold, fact_of
from outbox.broker.operations.state import BrokerState
from outbox.contrib.blocked_keys.blocking import list_blocked_keys

CONDITIONS: Final = Declarations[BrokerState]()
BLOCKED_KEY_SECONDS: Final = Threshold(
    "blocked_key_seconds", 60, 3600, "seconds", "time since a dead letter blocks its key, if later messages wait for it"
)


@CONDITIONS.declare(
    meaning="A dead letter blocks its key, and later messages of the key wait.",
    next_step="Correct the cause of its error. Then replay it with `outbox_dead_letter replay`, or discard it; the "
    "waiting messages follow in order. `outbox_group unblock` lets them pass.",
    concern=Concern.WAITING,
    thresholds=(BLOCKED_KEY_SECONDS,),
    shown=Shown(listed=BY_ERROR),
)
def blocked_key(state: BrokerState) -> Iterator[Judged]:
    for one in state.once(list_blocked_keys):
        severity, since = state.judge(BLOCKED_KEY_SECONDS, one.blocked_seconds), one.blocked_seconds
        named = ("group", "topic", "key", "waiting")
        yield severity, fact_of(one, *named, message_id=str(one.message_id), since_seconds=since)
