"""An overview of the broker: the leader, and the summary's numbers per topic and group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.operations.summary import GroupProgress, Summary, TopicProgress

_BROKER: Final = Statement("""
SELECT broker_id::text, incarnation, (SELECT max(change) FROM {schema}.schema_version),
       (SELECT owner::text FROM {schema}.leader_lease WHERE role = 'sequencer' AND expires_at > clock_timestamp()),
       tick_id, extract(epoch FROM clock_timestamp() - at)::double precision
FROM {schema}.broker, (SELECT tick_id, at FROM {schema}.tick ORDER BY tick_id DESC LIMIT 1) AS tick
""")

_CONSUMERS: Final = Statement("""
SELECT name, count(*) FROM {schema}.consumer JOIN {schema}.consumer_group USING (group_id)
WHERE expires_at > clock_timestamp() GROUP BY name ORDER BY name
""")


@dataclass(frozen=True, slots=True)
class GroupOverview:
    """One consumer group over all its topics; `retrying`: messages that wait for another attempt, queued or not."""

    name: str
    topics: int
    consumers: int
    paused: bool
    broadcast: bool
    lag: int
    oldest_seconds: float | None
    handled: int
    retrying: int
    dead: int
    blocked: int
    stopped: int


@dataclass(frozen=True, slots=True)
class Overview:
    """The whole overview; `counted_seconds_ago`: the age of the numbers of topics and groups."""

    broker_id: str
    incarnation: int
    schema_version: int
    leader: str | None
    last_tick: int
    last_tick_seconds_ago: float
    counted_seconds_ago: float
    topics: Sequence[TopicProgress]
    groups: Sequence[GroupOverview]

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)


def has_leader(run: Executor) -> bool:
    """Whether a process sequences."""
    return run.one(_BROKER)[3] is not None


def live_consumers(run: Executor) -> dict[str, int]:
    """Return the number of live consumer processes by group; groups without one are left out."""
    return dict(run.rows(_CONSUMERS))


def overview(run: Executor, summary: Summary) -> Overview:
    """Read the overview: two small statements beside the summary."""
    broker_id, incarnation, change, leader, tick, tick_seconds = run.one(_BROKER)
    consumers = live_consumers(run)
    places: dict[str, list[GroupProgress]] = {}
    for place in summary.groups:
        places.setdefault(place.group, []).append(place)
    groups = []
    for rest in summary.rests:
        of_group = places.get(rest.group, [])
        topics = [place for place in of_group if not place.is_retry]
        oldest = min((place.oldest_at for place in topics if place.oldest_at is not None), default=None)
        groups.append(
            GroupOverview(
                name=rest.group,
                topics=len(topics),
                consumers=consumers.get(rest.group, 0),
                paused=rest.paused,
                broadcast=rest.broadcast,
                lag=sum(place.lag for place in topics),
                oldest_seconds=summary.seconds_since(oldest),
                handled=sum(place.handled for place in of_group),
                retrying=rest.retrying + sum(place.lag for place in of_group if place.is_retry),
                dead=rest.dead,
                blocked=sum(place.blocked for place in of_group),
                stopped=sum(place.stopped for place in of_group),
            )
        )
    return Overview(
        broker_id, incarnation, change, leader, tick, tick_seconds, summary.age_seconds, summary.topics, groups
    )
