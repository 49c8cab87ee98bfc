"""The summary: numbers that take long to count, counted in the background and read as one row.

The leading process refreshes the summary (`summaries`), more rarely if counting takes long. If no process leads and the
summary is old, the reader counts the numbers itself. Times are seconds since 1970 by the database's clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus

from outbox.broker.database import timeouts
from outbox.broker.database.connection import BrokerDatabase, Connection
from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement
from outbox.broker.database.timeouts import lock_limited
from outbox.broker.groups.members import code_version
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.operations import topic_limits
from outbox.broker.operations.liveness import leadership
from outbox.broker.operations.progress import EVERY, GROUPS
from outbox.errors import BrokerUnavailable
from outbox.utils.periodic import BackgroundLoop

# The figures of a group that are not about its queues (`GroupRest`).
_RESTS: Final = """
SELECT consumer_group.name AS group, consumer_group.paused, consumer_group.broadcast,
       coalesce(letters.dead, 0) AS dead, extract(epoch FROM letters.newest)::double precision AS newest_dead_at,
       coalesce(retries.waiting, 0) AS retrying, coalesce(retries.claimed, 0) AS claimed,
       coalesce(counted.timed_out, 0)::bigint AS timed_out
FROM {schema}.consumer_group
LEFT JOIN (SELECT group_id, count(*) AS dead, max(dead_at) AS newest FROM {schema}.dead_letter
           WHERE replayed_at IS NULL GROUP BY group_id) AS letters USING (group_id)
LEFT JOIN (SELECT retry_of AS group_id, count(*) FILTER (WHERE NOT claimed) AS waiting,
                  count(*) FILTER (WHERE claimed) AS claimed
           FROM {schema}.scheduled JOIN {schema}.queue USING (queue_id) JOIN {schema}.topic USING (topic_id)
           WHERE retry_of IS NOT NULL GROUP BY retry_of) AS retries USING (group_id)
LEFT JOIN (SELECT group_id, sum(timed_out) AS timed_out FROM {schema}.subscription GROUP BY group_id) AS counted
    USING (group_id)
ORDER BY consumer_group.name
"""

# Per producer group (`ProducerProgress`).
_PRODUCERS: Final = """
SELECT producer_group AS group, count(*) FILTER (WHERE parked_at IS NULL) AS undecided,
       count(*) FILTER (WHERE parked_at IS NOT NULL) AS parked,
       extract(epoch FROM min(stored_at) FILTER (WHERE parked_at IS NULL))::double precision AS oldest_at,
       extract(epoch FROM min(due_at) FILTER (WHERE parked_at IS NULL))::double precision AS due_since
FROM {schema}.pending_check pending
WHERE NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending.transaction_id)
GROUP BY producer_group ORDER BY producer_group
"""

# Per topic (`TopicProgress`).
_TOPICS: Final = """
WITH reader AS (
    SELECT group_id, topic_id FROM {schema}.subscription JOIN {schema}.consumer_group USING (group_id)
    WHERE NOT broadcast
), consumed AS MATERIALIZED (
    SELECT queue_id, min(coalesce(newest.next_offset, 0)) AS position
    FROM reader JOIN {schema}.queue USING (topic_id) LEFT JOIN newest USING (group_id, queue_id) GROUP BY queue_id
), of_queue AS (
    SELECT queue.topic_id, ends.head,
           (SELECT log.stored_at
            FROM {schema}.consume_queue entry JOIN {schema}.commit_log log USING (log_id)
            WHERE entry.queue_id = queue.queue_id AND entry.queue_offset = queue.floor
              AND queue.floor < consumed.position) AS oldest_consumed
    FROM {schema}.queue JOIN ends USING (queue_id) LEFT JOIN consumed USING (queue_id)
), undecided AS (
    SELECT topic_id, count(*) FILTER (WHERE parked_at IS NULL) AS undecided, count(parked_at) AS parked
    FROM {schema}.pending_check pending JOIN {schema}.commit_log USING (log_id)
    WHERE NOT EXISTS (SELECT FROM {schema}.op_log WHERE op_log.transaction_id = pending.transaction_id)
    GROUP BY topic_id
)
SELECT topic.name AS topic, count(*) AS queues, sum(head)::bigint AS queued,
       coalesce(min(undecided.undecided), 0) AS undecided, coalesce(min(undecided.parked), 0) AS parked,
       (SELECT count(*) FROM {schema}.held WHERE held.topic_id = topic.topic_id) AS held,
       extract(epoch FROM min(oldest_consumed) + make_interval(secs => topic.retention_seconds))::double precision
           AS behind_since
FROM of_queue JOIN {schema}.topic USING (topic_id) LEFT JOIN undecided USING (topic_id)
WHERE topic.retry_of IS NULL
GROUP BY topic.topic_id ORDER BY topic.name
"""

# One statement, because the leader executes it every few seconds, even if there are no messages.
_COUNT: Final = Statement(f"""
WITH {EVERY}
SELECT extract(epoch FROM clock_timestamp())::double precision,
       (SELECT CASE WHEN has_sequence_privilege(ids, 'SELECT, USAGE') THEN coalesce(pg_sequence_last_value(ids), 0) END
        FROM CAST(pg_get_serial_sequence('{{schema}}.commit_log', 'log_id') AS regclass) AS ids),
       (SELECT coalesce(jsonb_agg(to_jsonb(counted)), '[]') FROM ({GROUPS}) AS counted),
       (SELECT coalesce(jsonb_agg(to_jsonb(counted)), '[]') FROM ({_RESTS}) AS counted),
       (SELECT coalesce(jsonb_agg(to_jsonb(counted)), '[]') FROM ({_PRODUCERS}) AS counted),
       (SELECT coalesce(jsonb_agg(to_jsonb(counted)), '[]') FROM ({_TOPICS}) AS counted)
""")

# The statement deletes old summaries. Rates are computed from the newer ones.
_STORE: Final = Statement("""
WITH trimmed AS (
    DELETE FROM {schema}.summary WHERE at < clock_timestamp() - make_interval(secs => %(kept)s)
      AND summary_id < (SELECT max(summary_id) FROM {schema}.summary)
)
INSERT INTO {schema}.summary (took_seconds, facts, totals)
VALUES (%(took)s, %(facts)s::text::jsonb, %(totals)s::text::jsonb)
""")

_NEWEST: Final = Statement("""
SELECT extract(epoch FROM at)::double precision, took_seconds,
       extract(epoch FROM clock_timestamp())::double precision, facts
FROM {schema}.summary ORDER BY summary_id DESC LIMIT 1
""")

# The totals of the youngest summary that is at least `window` seconds old, and of the newest one.
_TOTALS: Final = Statement("""
(SELECT extract(epoch FROM at)::double precision, totals FROM {schema}.summary
 WHERE at <= clock_timestamp() - make_interval(secs => %(window)s) ORDER BY summary_id DESC LIMIT 1)
UNION ALL
(SELECT extract(epoch FROM at)::double precision, totals FROM {schema}.summary ORDER BY summary_id DESC LIMIT 1)
""")

_Row = TypeVar("_Row")

# All summaries of this time are kept, and the diagrams show them.
KEPT_SECONDS: Final = 900.0
# The leader counts at this interval, or more rarely if a count takes long.
COUNT_SECONDS: Final = 5.0
# Readers do not use a summary that is older than this number of seconds, because its writer has probably stopped.
FRESH_SECONDS: Final = 60.0
# The largest share of the time that a process spends on counting in the background.
SHARE: Final = 0.05
# The first summary of a leader is counted while its first ticks queue the messages that have waited for a leader. It
# would say "in order" while these messages are in no queue, so a summary names its leader and its number.
_COUNTS_UNTIL_CURRENT: Final = 2


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """A consumer group on one topic, or on its retry queue: the sums of `QueueProgress`.

    `blocked` and `stopped` count queues. A broadcast group has none, because it stores no positions.
    """

    group: str
    topic: str
    is_retry: bool
    paused: bool
    queues: int
    lag: int
    oldest_at: float | None
    queued: int
    handled: int
    filtered: int
    skipped: int
    sent_back: int
    dead: int
    expired: int
    blocked: int
    stopped: int


@dataclass(frozen=True, slots=True)
class GroupRest:
    """A group's data outside its queues: unsettled dead letters, and messages that wait for their next attempt.

    `claimed` counts the messages that have left their queue while their handler runs. `timed_out` is the total of the
    messages that the group did not handle, because their time limit was over.
    """

    group: str
    paused: bool
    broadcast: bool
    dead: int
    newest_dead_at: float | None
    retrying: int
    claimed: int = 0
    timed_out: int = 0


@dataclass(frozen=True, slots=True)
class ProducerProgress:
    """The undecided transactions of a producer group. `due_since`: the time at which the first check became due."""

    group: str
    undecided: int
    parked: int
    oldest_at: float | None
    due_since: float | None


@dataclass(frozen=True, slots=True)
class TopicProgress:
    """The figures of a topic. `queued`: all messages that came into its queues; other fields count those in no queue.

    `behind_since`: the time, perhaps in the future, from which retention may remove the oldest message that every group
    has consumed.
    """

    topic: str
    queues: int
    queued: int
    undecided: int
    parked: int
    held: int
    behind_since: float | None


@dataclass(frozen=True, slots=True)
class LeadingProcess:
    """The leader that stored a summary. `counts`: the number of summaries that it has stored since it leads.

    `owner` is the owner of its leader lease.
    """

    owner: str
    host: str
    pid: int
    version: str
    counts: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The whole summary: when the figures were counted (`at`), when they were read (`now`), and the figures.

    `drawn`: the number of assigned log ids; None in a stored summary, and if the role may not read it.
    `stored_age_seconds`: the age of the newest stored summary, or None. `is_late`: no stored summary was fresh, so the
    reader has counted. `leader` is None if the reader or a leader of an earlier version has counted.
    """

    at: float
    now: float
    took_seconds: float
    groups: Sequence[GroupProgress]
    rests: Sequence[GroupRest]
    producers: Sequence[ProducerProgress]
    topics: Sequence[TopicProgress]
    drawn: int | None = None
    stored_age_seconds: float | None = None
    is_late: bool = False
    leader: LeadingProcess | None = None

    @property
    def age_seconds(self) -> float:
        return max(0.0, self.now - self.at)

    @property
    def every_seconds(self) -> float:
        """The interval at which a leader counts, if a count takes as long as this one."""
        return max(COUNT_SECONDS, self.took_seconds / SHARE)

    def seconds_since(self, at: float | None) -> float | None:
        """The seconds from `at` until the figures were counted; None if `at` is None.

        It is finite: JSON holds an infinite time as a text, and times before 1970 count as 1970.
        """
        return None if at is None else max(0.0, self.at - max(0.0, float(at)))


# The types of the rows, in the order in which `_COUNT` returns them.
_PARTS: Final[Mapping[str, type[Any]]] = {
    "groups": GroupProgress,
    "rests": GroupRest,
    "producers": ProducerProgress,
    "topics": TopicProgress,
}


_LIMITS: Final = "SET LOCAL jit = off; SET LOCAL lock_timeout = '1s'"


def count(run: Executor) -> Summary:
    """Count all figures now, in one snapshot: of the caller's transaction if there is one.

    It reads every position and every unsettled message, which takes seconds on the largest brokers. Raises
    LockNotAvailable when a session keeps a table locked.
    """
    started = time.monotonic()
    with _limited(run.connection):
        now, drawn, *counted = run.one(_COUNT, prepare=False)
        groups, rests, producers, topics = (
            [row_type(**row) for row in rows] for row_type, rows in zip(_PARTS.values(), counted, strict=True)
        )
    took = time.monotonic() - started
    return Summary(
        at=now, now=now, took_seconds=took, groups=groups, rests=rests, producers=producers, topics=topics, drawn=drawn
    )


@contextmanager
def _limited(connection: Connection) -> Iterator[None]:
    # Without `lock_timeout`, the wait for a lock would count as time of counting, and the next count would begin later.
    # `prepare` is False, because PostgreSQL cannot prepare a string with several statements.
    if connection.info.transaction_status is not TransactionStatus.IDLE:
        with connection.transaction():
            connection.execute(_LIMITS, prepare=False)
            yield
        return
    connection.execute(f"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {_LIMITS}", prepare=False)
    try:
        yield
    finally:
        connection.rollback()


def refresh(run: Executor, leader: LeadingProcess | None = None) -> Summary:
    """Count, and store the summary. `leader`: the process that counts, if it leads."""
    summary = count(run)
    facts: dict[str, Any] = {name: _packed(row_type, getattr(summary, name)) for name, row_type in _PARTS.items()}
    if leader is not None:
        facts["leader"] = dataclasses.asdict(leader)
    stored = {"took": summary.took_seconds, "facts": json.dumps(facts), "totals": json.dumps(_totals(summary))}
    run.execute(_STORE, stored | {"kept": KEPT_SECONDS})
    return summary


def read(run: Executor) -> Summary:
    """Return the newest stored summary; if it is too old, count now. Raises LockNotAvailable as `count` does."""
    found = stored(run)
    if found is None:
        return replace(count(run), is_late=True)
    # If a count takes long, the leading process counts more rarely.
    if found.age_seconds > max(FRESH_SECONDS, 2 * found.took_seconds / SHARE):
        return replace(count(run), is_late=True, stored_age_seconds=found.stored_age_seconds)
    return found


def stored(run: Executor) -> Summary | None:
    """Return the newest stored summary, however old it is; None if there is none."""
    with lock_limited(run.connection):
        row = run.row(_NEWEST)
        if row is None:
            return None
        at, took, now, facts = row
        parts: dict[str, Any] = {name: _unpacked(row_type, facts[name]) for name, row_type in _PARTS.items()}
    leader = None
    if found := facts.get("leader"):
        # A leader of a later version may store further fields.
        leader = LeadingProcess(**{field.name: found[field.name] for field in fields(LeadingProcess)})
    return Summary(at=at, now=now, took_seconds=took, stored_age_seconds=now - at, leader=leader, **parts)


def growth(run: Executor, *, window_seconds: float) -> list[Row]:
    """Return how many messages each group has `handled`, `sent_back` or given up (`dead`) in the last `seconds`.

    `seconds` is `window_seconds` or a little more; if no summary is that old, the list is empty. Messages that left
    their queue for a claim count as handled when they are done, and not as sent back.
    """
    rows = run.rows(_TOTALS, {"window": window_seconds})
    if len(rows) < 2:
        return []
    (began, before), (ended, after) = rows
    grown = {
        group: [max(0, new - old) for new, old in zip(totals, before["groups"][group], strict=True)]
        for group, totals in after["groups"].items()
        if group in before["groups"]
    }
    return [
        Row(group=group, seconds=ended - began, handled=handled, sent_back=sent_back, dead=dead)
        for group, (handled, sent_back, dead, *_) in grown.items()
    ]


def _totals(summary: Summary) -> dict[str, Any]:
    """Return the data for `growth` and the diagrams: the total of queued messages, and five figures per group.

    The key `all` has the five figures of all groups together.
    """
    found: dict[str, list[float]] = {}
    claimed = {one.group: one.claimed for one in summary.rests}
    for one in summary.groups:
        # A claimed message leaves its queue as one that is sent back, although it has not failed. When its handler is
        # done, the redelivery is skipped.
        known = found.setdefault(one.group, [0, -claimed.get(one.group, 0), 0, 0, 0.0])
        sent_back = one.sent_back - one.skipped if one.is_retry else one.sent_back
        for place, number in enumerate((one.handled, sent_back, one.dead, 0 if one.is_retry else one.lag)):
            known[place] += number
        if not one.is_retry:
            known[4] = max(known[4], summary.seconds_since(one.oldest_at) or 0.0)
    for row in found.values():
        row[1] = max(0, row[1])
    rows = list(found.values())
    together = [*(sum(row[place] for row in rows) for place in range(4)), max((row[4] for row in rows), default=0.0)]
    queued = sum(topic.queued for topic in summary.topics)
    return {"stored": summary.drawn, "queued": queued, "all": together, "groups": found}


def _packed(row_type: type[Any], rows: Iterable[Any]) -> dict[str, Any]:
    """Return the rows, with the column names stored once, so that code of another version can find the columns."""
    columns = [field.name for field in fields(row_type)]
    return {"columns": columns, "rows": [[getattr(row, name) for name in columns] for row in rows]}


def _unpacked(row_type: type[_Row], packed: Mapping[str, Any]) -> list[_Row]:
    known = [field.name for field in fields(row_type)]  # type: ignore[arg-type]
    if packed["columns"] == known:
        # There may be thousands of rows, and positions take half the time of names.
        return [row_type(*row) for row in packed["rows"]]
    # A leader of an earlier version stores no column for a newer field, which then has its default.
    places = [(name, place) for place, name in enumerate(packed["columns"]) if name in known]
    return [row_type(**{name: row[place] for name, place in places}) for row in packed["rows"]]


# ---------------------------------------------------------------------------------------------------------------------
# An overview of the broker: the leader, and the summary's numbers per topic and group.

_PROCESSES: Final = Statement("""
SELECT (SELECT version FROM {schema}.schema_version WHERE name = 'core'),
       (SELECT count(DISTINCT instance_id) FROM {schema}.consumer WHERE expires_at > clock_timestamp())
""")

_CONSUMERS: Final = Statement("""
SELECT name, count(*) FROM {schema}.consumer JOIN {schema}.consumer_group USING (group_id)
WHERE expires_at > clock_timestamp() GROUP BY name ORDER BY name
""")


@dataclass(frozen=True, slots=True)
class Overview:
    """The overview. `counted_seconds_ago`: the age of the numbers of topics and groups.

    `groups`: each consumer group over all its topics. `retrying`: messages that wait for another attempt, queued or
    not. `processes`: the number of live consumer processes. `leading`: the process that leads; None until it has stored
    its first summary. `is_current` is False until the leader has counted twice: messages that waited for it are not in
    the figures yet.
    """

    broker_id: str
    incarnation: int
    schema_version: int
    leader: str | None
    last_tick: int
    last_tick_seconds_ago: float
    counted_seconds_ago: float
    topics: Sequence[TopicProgress]
    groups: Sequence[Row]
    processes: int
    leading: LeadingProcess | None = None
    is_current: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**dataclasses.asdict(self), "groups": [vars(one) for one in self.groups]}


def live_consumers(run: Executor) -> dict[str, int]:
    """Return the number of live consumer processes by group; groups without a live process are left out."""
    return dict(run.rows(_CONSUMERS))


def overview(run: Executor, summary: Summary) -> Overview:
    """Return the overview, which needs the summary and two small statements."""
    now, (version, processes) = leadership(run), run.one(_PROCESSES)
    consumers = live_consumers(run)
    counted_by = summary.leader
    is_of_leader = counted_by is not None and counted_by.owner == now.leader
    places: dict[str, list[GroupProgress]] = {}
    for place in summary.groups:
        places.setdefault(place.group, []).append(place)
    groups = []
    for rest in summary.rests:
        of_group = places.get(rest.group, [])
        topics = [place for place in of_group if not place.is_retry]
        # JSON has an infinite time as a text.
        oldest = min((float(place.oldest_at) for place in topics if place.oldest_at is not None), default=None)
        groups.append(
            Row(
                name=rest.group,
                topics=len(topics),
                consumers=consumers.get(rest.group, 0),
                paused=rest.paused,
                broadcast=rest.broadcast,
                lag=sum(place.lag for place in topics),
                oldest_seconds=summary.seconds_since(oldest),
                handled=sum(place.handled for place in of_group),
                claimed=rest.claimed,
                retrying=rest.retrying + sum(place.lag for place in of_group if place.is_retry),
                dead=rest.dead,
                timed_out=rest.timed_out,
                blocked=sum(place.blocked for place in of_group),
                stopped=sum(place.stopped for place in of_group),
            )
        )
    return Overview(
        now.broker_id,
        now.incarnation,
        version,
        now.leader,
        now.tick_id,
        now.tick_seconds,
        summary.age_seconds,
        summary.topics,
        groups,
        processes,
        leading=counted_by if is_of_leader else None,
        is_current=now.leader is not None
        and (counted_by is None or (is_of_leader and counted_by.counts >= _COUNTS_UNTIL_CURRENT)),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Refresh the summary while this process leads.


def run_once(database: BrokerDatabase, leader: LeadingProcess | None = None) -> float:
    """Refresh the summary on a separate connection, and mark the topics whose limits are exceeded.

    Return how long counting took, in seconds. Raises psycopg.Error or BrokerUnavailable.
    """
    with contextlib.closing(database.open(name="outbox-summary", direct=True)) as connection:
        is_lifted = timeouts.lift_where_direct(connection)
        with contextlib.nullcontext() if is_lifted else timeouts.lifted(connection):
            run = Executor(connection, database.schema)
            summary = refresh(run, leader)
            topic_limits.mark_topics(run, lags_of(summary))
            return summary.took_seconds


def lags_of(summary: Summary) -> topic_limits.Lags:
    """Return the lag of each group on each of its topics, without retries."""
    return [(one.topic, one.group, one.lag) for one in summary.groups if not one.is_retry]


def summaries(database: BrokerDatabase, owner: UUID, *, every_seconds: float) -> BackgroundLoop:
    """Refresh the summary in the background: now, then every `every_seconds`, or more rarely if counting takes long.

    `owner`: the owner of the leader lease. The second summary is never delayed, because the first one is not current.
    """
    note = FailureNote(database, ProcessPart.SUMMARY)
    numbers = itertools.count(1)
    host, version = socket.gethostname(), code_version()

    def run(stopping: Callable[[], bool]) -> float:
        with note.watching():
            number = next(numbers)
            took_seconds = run_once(database, LeadingProcess(str(owner), host, os.getpid(), version, number))
            return every_seconds if number < _COUNTS_UNTIL_CURRENT else max(every_seconds, took_seconds / SHARE)

    expected = (psycopg.Error, BrokerUnavailable)
    return BackgroundLoop("summary", run, every_seconds=every_seconds, first_seconds=0.0, expected=expected)
