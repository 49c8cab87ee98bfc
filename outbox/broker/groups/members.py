"""The live members and the queues of a consumer group, the outages of its members, and what dead members still hold.

See decision 232.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from typing import Final
from uuid import UUID

from outbox import hooks
from outbox.broker.database import arrays
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.groups import leases
from outbox.broker.groups.leases import QueueKey
from outbox.broker.groups.offsets import newest_offset
from outbox.utils.process_identity import has_ended, process_identity

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """A live consumer instance of a group."""

    instance_id: UUID
    topics: frozenset[str]


@dataclass(frozen=True, slots=True)
class GroupState:
    """The settings of a group that an operator can change at run time, and whether it has quarantined messages."""

    group_id: int
    paused: bool
    generation: int
    has_quarantined: bool


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue of a group. For a retry queue, `topic` is None, and `retried_topic` the topic whose messages it has."""

    group_id: int
    queue_id: int
    topic: str | None
    number: int
    owner: UUID | None
    epoch: int
    expired: bool
    stopped: str | None
    retried_topic: str | None = None

    @property
    def key(self) -> QueueKey:
        """The ids of the group and of the queue."""
        return (self.group_id, self.queue_id)


@dataclass(frozen=True, slots=True)
class CallReport:
    """A handler call that runs now: its first message, the number of its messages, and for how long it has run."""

    group: str
    topic: str
    message_id: str
    messages: int
    attempt: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CallsReport:
    """The number of handler calls that run now in a process, and the longest of these calls, the longest first."""

    calls: int = 0
    longest: Sequence[CallReport] = ()


# One statement writes both tables, so the report about the process costs no round trip.
_HEARTBEAT = Statement("""
WITH joined AS (
    INSERT INTO {schema}.consumer AS known (instance_id, group_id, topics, host, pid, process, expires_at)
    SELECT %(instance)s, mine.group_id, mine.topics::text[], %(host)s, %(pid)s, %(process)s,
           clock_timestamp() + make_interval(secs => %(term)s)
    FROM unnest(%(group_ids)s::integer[], %(topics)s::text[]) AS mine (group_id, topics)
    ORDER BY mine.group_id
    ON CONFLICT (instance_id, group_id) DO UPDATE SET expires_at = excluded.expires_at
)
INSERT INTO {schema}.consumer_process AS known (instance_id, version, seen_at, calls, longest, draining)
VALUES (%(instance)s, %(version)s, clock_timestamp(), %(calls)s, %(longest)s::text::jsonb, %(draining)s)
ON CONFLICT (instance_id) DO UPDATE
SET seen_at = excluded.seen_at, calls = excluded.calls, longest = excluded.longest, draining = excluded.draining
""")


def heartbeat(
    run: Executor,
    instance: UUID,
    topics: Mapping[int, Sequence[str]],
    *,
    term_seconds: float,
    report: CallsReport = CallsReport(),
    draining: bool = False,
) -> None:
    """Let the memberships of this instance expire `term_seconds` from now, and store its running calls for operators.

    `topics`: those to which this instance subscribes, by group id. `draining`: the process takes no more messages.
    """
    parameters = {
        "instance": instance,
        "group_ids": arrays.integers(list(topics)),
        "topics": arrays.texts(["{" + ",".join(f'"{name}"' for name in names) + "}" for names in topics.values()]),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process": process_identity(),
        "term": term_seconds,
        "version": code_version(),
        "calls": report.calls,
        "longest": json.dumps([asdict(call) for call in report.longest]),
        "draining": draining,
    }
    run.execute(_HEARTBEAT, parameters)


@cache
def code_version() -> str:
    """Return the version of the installed package; '' if outbox runs from a folder that is not installed."""
    try:
        return metadata.version("outbox-transactional")
    except metadata.PackageNotFoundError:
        return ""


_FORGET_OUTAGES = Statement("""
DELETE FROM {schema}.outage o
WHERE o.instance_id = %(instance)s OR o.seen_at < clock_timestamp() - interval '1 day'
""")
_LEAVE = Statement("""
WITH process AS (DELETE FROM {schema}.consumer_process WHERE instance_id = %(instance)s)
DELETE FROM {schema}.consumer WHERE instance_id = %(instance)s
""")


def leave_groups(run: Executor, instance: UUID) -> None:
    """Remove this instance and its outages, so that the other members acquire its queues at once.

    Also removes the outages that no instance has updated for a day.
    """
    run.execute(_FORGET_OUTAGES, {"instance": instance})
    for rows in hooks.subscription_rows.values():
        hooks.resolved(rows.process_ended)(run, instance)
    run.execute(_LEAVE, {"instance": instance})


_FORGET = Statement("""
WITH process AS (DELETE FROM {schema}.consumer_process WHERE seen_at < clock_timestamp() - interval '1 day')
DELETE FROM {schema}.consumer WHERE expires_at < clock_timestamp() - interval '1 day'
""")


def forget_the_dead(run: Executor) -> None:
    """Remove the rows of instances that died without leaving their groups, one day after the rows expired."""
    run.execute(_FORGET)
    for rows in hooks.subscription_rows.values():
        hooks.resolved(rows.expired)(run)


_OF_THIS_MACHINE = Statement("""
SELECT DISTINCT instance_id, pid, process FROM {schema}.consumer
WHERE host = %(host)s AND process <> '' AND expires_at > clock_timestamp()
""")


def release_the_ended(run: Executor) -> None:
    """Let the ended processes of this machine leave their groups, when another one starts.

    After `kill -9` of a whole worker, no supervisor is left that would release their leases, and their queues would
    stand still until the leases expire. Their messages go into quarantine only if a supervisor has seen the process
    die: this function does not know why a process has ended.
    """
    for instance, pid, process in run.rows(_OF_THIS_MACHINE, {"host": socket.gethostname()}):
        if has_ended(process):
            logger.warning("process %d has ended without its worker: its queues are free again", pid)
            with run.connection.transaction():
                leases.release_all(run, instance)
                leave_groups(run, instance)


_REPORT_OUTAGE = Statement("""
INSERT INTO {schema}.outage AS known (instance_id, group_id, topic_id, error, since, next_call_at)
VALUES (%(instance)s, %(group_id)s, %(topic_id)s, %(error)s, clock_timestamp() - make_interval(secs => %(ago)s),
        clock_timestamp() + make_interval(secs => %(pause)s))
ON CONFLICT (instance_id, group_id, topic_id)
DO UPDATE SET error = excluded.error, seen_at = clock_timestamp(), next_call_at = excluded.next_call_at
""")


def report_outage(
    run: Executor,
    instance: UUID,
    group_id: int,
    topic_id: int,
    error: str,
    *,
    seconds_ago: float = 0.0,
    pause_seconds: float = 0.0,
) -> None:
    """Record that a subscription of this instance pauses, or that a call after a pause has failed again.

    `seconds_ago`: the time since the first failure. `pause_seconds`: the time until the next call.
    """
    place = {"instance": instance, "group_id": group_id, "topic_id": topic_id}
    run.execute(_REPORT_OUTAGE, {**place, "error": error, "ago": seconds_ago, "pause": pause_seconds})


# The last process whose subscription continues records the incident. An outage that began before the incident of an
# earlier one extends it; the incident keeps the earliest begin.
_END_OUTAGE = Statement("""
WITH ended AS (
    DELETE FROM {schema}.outage
    WHERE instance_id = %(instance)s AND group_id = %(group_id)s AND topic_id = %(topic_id)s
    RETURNING *
), told AS (
    SELECT since, consumer_group.name || ' on ' || topic.name AS subject, date_trunc('second', since)::text AS began,
           ' to ' || date_trunc('second', clock_timestamp()) || E'\n' || error AS rest
    FROM ended JOIN {schema}.consumer_group USING (group_id) JOIN {schema}.topic USING (topic_id)
    WHERE %(has_succeeded)s AND NOT EXISTS (
        SELECT FROM {schema}.outage other JOIN {schema}.consumer USING (group_id, instance_id)
        WHERE other.group_id = ended.group_id AND other.topic_id = ended.topic_id
          AND other.instance_id <> ended.instance_id AND expires_at > clock_timestamp())
), extended AS (
    UPDATE {schema}.incident
    SET at = clock_timestamp(),
        detail = 'from ' || least(began::timestamptz,
                                  substring(detail FROM '^from (.+?) to [0-9]')::timestamptz)::text || rest
    FROM told
    WHERE incident_id = (SELECT max(incident_id) FROM {schema}.incident
                         WHERE at > told.since AND kind = 'outage' AND subject = told.subject)
    RETURNING incident_id
)
INSERT INTO {schema}.incident (kind, subject, detail)
SELECT 'outage', subject, 'from ' || began || rest FROM told WHERE NOT EXISTS (SELECT FROM extended)
""")


def end_outage(run: Executor, instance: UUID, group_id: int, topic_id: int, *, has_succeeded: bool) -> None:
    """Remove the outage of a subscription of this instance, because the subscription continues.

    Record an incident only if a call has succeeded: otherwise the service may still be down.
    """
    place = {"instance": instance, "group_id": group_id, "topic_id": topic_id}
    run.execute(_END_OUTAGE, {**place, "has_succeeded": has_succeeded})


_LIVE: Final = """
SELECT group_id, instance_id, topics FROM {schema}.consumer
WHERE group_id = ANY(%(group_ids)s::integer[]) AND expires_at > clock_timestamp()
ORDER BY group_id, instance_id
"""

_SWITCHES: Final = """
SELECT group_id, paused, generation,
       EXISTS (SELECT FROM {schema}.quarantined_message s WHERE s.group_id = g.group_id) AS has_quarantined
FROM {schema}.consumer_group g WHERE group_id = ANY(%(group_ids)s::integer[])
"""
_GROUPS = Statement(_SWITCHES)


def groups(run: Executor, group_ids: Sequence[int]) -> dict[int, GroupState]:
    states = run.objects(GroupState, _GROUPS, {"group_ids": arrays.integers(group_ids)})
    return {state.group_id: state for state in states}


# The members consume the queues of one layout of a topic at a time. They consume the queues of a newer layout when the
# group has consumed all queues of the older layouts.
_SHARED: Final = f"""
WITH wanted AS (
    SELECT s.group_id, s.topic_id, t.name FROM {{schema}}.subscription s JOIN {{schema}}.topic t USING (topic_id)
    WHERE s.group_id = ANY(%(group_ids)s::integer[])
    UNION ALL
    SELECT t.retry_of, t.topic_id, NULL FROM {{schema}}.topic t WHERE t.retry_of = ANY(%(group_ids)s::integer[])
), candidate AS (
    SELECT w.group_id, w.name, q.queue_id, q.topic_id, q.layout, q.number,
           q.closed_at IS NOT NULL AND coalesce(position.next_offset, 0) >= q.closed_at AS consumed
    FROM wanted w
    JOIN {{schema}}.queue q USING (topic_id)
    LEFT JOIN LATERAL {newest_offset("w.group_id", "q.queue_id", only="q.closed_at IS NOT NULL")} AS position ON true
), turn AS (
    SELECT group_id, topic_id, min(layout) AS layout FROM candidate WHERE NOT consumed GROUP BY 1, 2
)
SELECT c.group_id, c.queue_id, c.name AS topic, c.number, l.owner, coalesce(l.epoch, 0) AS epoch,
       coalesce(l.expires_at < clock_timestamp(), true) AS expired, l.stopped, retried.name AS retried_topic
FROM candidate c
JOIN turn USING (group_id, topic_id, layout)
LEFT JOIN {{schema}}.queue_lease l ON l.group_id = c.group_id AND l.queue_id = c.queue_id
LEFT JOIN {{schema}}.topic retried ON c.name IS NULL AND retried.topic_id = c.number
WHERE NOT c.consumed
ORDER BY c.group_id, c.topic_id, c.number
"""


_NAMES = Statement("""
SELECT (SELECT coalesce(jsonb_object_agg(group_id, name), '{{}}') FROM {schema}.consumer_group
        WHERE group_id = ANY (%(group_ids)s::integer[])),
       (SELECT coalesce(jsonb_object_agg(topic_id, name), '{{}}') FROM {schema}.topic
        WHERE topic_id = ANY (%(topic_ids)s::integer[]))
""")


def names(
    run: Executor, group_ids: Sequence[int], topic_ids: Sequence[int]
) -> tuple[Mapping[int, str], Mapping[int, str]]:
    """Return the names of the groups and the topics that have these ids now."""
    groups, topics = run.one(_NAMES, {"group_ids": arrays.integers(group_ids), "topic_ids": arrays.integers(topic_ids)})
    return {int(key): name for key, name in groups.items()}, {int(key): name for key, name in topics.items()}


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """The data that a consumer needs about its groups: settings and live members by group id, and queues.

    `life` is the id of the present life (groups.lives); None if no process has stored the present life yet.
    """

    groups: Mapping[int, GroupState]
    members: Mapping[int, Sequence[Member]]
    queues: Sequence[QueueState]
    life: UUID | None


# One statement, because every consumer process executes it every second and usually finds no change.
_LOOK = Statement(f"""
SELECT (SELECT coalesce(jsonb_agg(to_jsonb(found)), '[]') FROM ({_SWITCHES}) AS found),
       (SELECT coalesce(jsonb_agg(to_jsonb(found)), '[]') FROM ({_LIVE}) AS found),
       (SELECT coalesce(jsonb_agg(to_jsonb(found)), '[]') FROM ({_SHARED}) AS found),
       {{schema}}.present_life()
""")


def look(run: Executor, group_ids: Sequence[int]) -> GroupSnapshot:
    """Read the data of these groups in one snapshot. Every instance gets the members in the same order."""
    states, alive, queues, life = run.one(_LOOK, {"group_ids": arrays.integers(group_ids)})
    found: dict[int, list[Member]] = {group_id: [] for group_id in group_ids}
    for row in alive:
        found[row["group_id"]].append(Member(UUID(row["instance_id"]), frozenset(row["topics"])))
    owned = [QueueState(**row | {"owner": UUID(row["owner"]) if row["owner"] else None}) for row in queues]
    return GroupSnapshot({row["group_id"]: GroupState(**row) for row in states}, found, owned, life)
