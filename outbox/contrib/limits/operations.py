"""The limits of subscriptions for operators: what the code declares, what an operator has changed, what is in use.

The condition and the metrics show the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from psycopg.types.json import Jsonb

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.operations.conditions import (
    OF_GROUP,
    Concern,
    Declarations,
    Fact,
    Judged,
    Place,
    Shown,
    Symptom,
    Threshold,
    fact_of,
)
from outbox.broker.operations.state import BrokerState
from outbox.contrib.limits.declaration import Limits
from outbox.errors import ConfigurationError, UsageError


@dataclass(frozen=True, slots=True)
class SubscriptionLimits:
    """The limits of a group on a topic.

    `override`: the fields that an operator has changed; None if the declared limits hold. `in_use`: the handler calls
    that run now. `waiting`: messages in the memory of consumers that wait for a limit. `waiting_seconds`: for how long
    messages have waited without a break.
    """

    group: str
    topic: str
    declared: Mapping[str, Any]
    override: Mapping[str, Any] | None
    in_use: int
    waiting: int
    waiting_for: str
    waiting_seconds: float | None

    @property
    def limits(self) -> Limits:
        """The limits that hold now."""
        return Limits(**self.declared).changed(self.override)


_LIST: Final = Statement("""
SELECT consumer_group.name AS "group", topic.name AS topic, declared, override,
       coalesce(demand.in_use, 0)::integer AS in_use, coalesce(demand.waiting, 0)::integer AS waiting,
       coalesce(demand.waiting_for, '') AS waiting_for, demand.waiting_seconds
FROM {schema}.subscription_limit
JOIN {schema}.consumer_group USING (group_id)
JOIN {schema}.topic USING (topic_id)
LEFT JOIN LATERAL (
    SELECT sum(in_use) AS in_use, sum(waiting) FILTER (WHERE waiting_for <> '') AS waiting,
           string_agg(DISTINCT nullif(waiting_for, ''), ', ') AS waiting_for,
           extract(epoch FROM clock_timestamp() - min(waiting_since))::double precision AS waiting_seconds
    FROM {schema}.slot_demand
    WHERE slot_demand.group_id = subscription_limit.group_id AND slot_demand.topic_id = subscription_limit.topic_id
      AND expires_at > clock_timestamp()
) AS demand ON true
WHERE %(group)s::text IS NULL OR consumer_group.name = %(group)s
ORDER BY 1, 2
""")
_CHANGE: Final = Statement("""
UPDATE {schema}.subscription_limit AS limits SET override = %(override)s, changed_at = clock_timestamp()
FROM {schema}.consumer_group, {schema}.topic
WHERE consumer_group.group_id = limits.group_id AND topic.topic_id = limits.topic_id
  AND consumer_group.name = %(group)s AND topic.name = %(topic)s
""")


def list_limits(run: Executor, group: str | None = None) -> list[SubscriptionLimits]:
    """Return the limits of all subscriptions, or of those of a group."""
    return run.objects(SubscriptionLimits, _LIST, {"group": group})


def waits(run: Executor) -> Mapping[tuple[str, str], Fact]:
    """Return the subscriptions whose messages wait for a limit: the limit, and what holds now."""
    return {
        (one.group, one.topic): {"waiting_for": f"{one.waiting_for} limit", "limits": str(one.limits)}
        for one in list_limits(run)
        if one.waiting_for
    }


def limits_now(run: Executor, group: str, topic: str) -> SubscriptionLimits:
    """Return the limits of a group on a topic. Raises UsageError if the code declares none."""
    for one in list_limits(run, group):
        if one.topic == topic:
            return one
    raise UsageError(
        f"group {group!r} has no limits on topic {topic!r}, because its code declares none: declare Limits in the "
        "options of the subscriber and start its workers again. After that, this command changes the limits."
    )


def planned(now: SubscriptionLimits, fields: Mapping[str, Any]) -> Limits:
    """Return the limits that would hold after a change of these fields. Raises UsageError for an impossible change."""
    if "per_key" in fields and "per_key" not in now.declared:
        raise UsageError(
            f"group {now.group!r} declares no per_key on topic {now.topic!r}, so its workers do not count calls per "
            "key: declare per_key at the subscriber and start the workers again."
        )
    try:
        return Limits(**{**now.limits.stored(), **fields})
    except ConfigurationError as error:
        raise UsageError(str(error)) from error


def change_limits(run: Executor, group: str, topic: str, override: Mapping[str, Any] | None) -> None:
    """Replace the override of a group on a topic. None: the declared limits hold again.

    Workers obey the change within about a second. Running handlers finish.
    """
    stored = None if override is None else Jsonb(dict(override))
    run.execute(_CHANGE, {"group": group, "topic": topic, "override": stored})


# -- condition and metrics -------------------------------------------------------------------------


CONDITIONS: Final = Declarations[BrokerState]()
LIMIT_SECONDS: Final = Threshold(
    "limit_seconds",
    600,
    None,
    "seconds",
    "how long messages of a group have waited without a break for one of its limits on the topic",
)


@CONDITIONS.declare(
    meaning="Messages of a group have waited long, because the group has reached a limit on the topic.",
    next_step="If the service that the handler calls allows it, raise the limit (docs/limits.md): `outbox_group "
    "limits GROUP TOPIC --running 5`.",
    concern=Concern.PASSING,
    symptom=Symptom.WAITING,
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
