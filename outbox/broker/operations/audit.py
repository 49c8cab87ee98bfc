"""The audit: count every message, check the equations below with separately counted terms, and store the result.

`sent = committed + rolled back + undecided + parked`, `committed = unsequenced + held + scheduled + recalled + queued`,
and per group `queued = handled + skipped + filtered + lag + claimed + retrying + dead + discarded + expired + recalled
+ timed out` (messages of running handlers are part of the lag until they leave their queue, and claimed from then on;
a retry can be recalled). A broken equation means that a message is lost or doubled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement
from outbox.broker.database.timeouts import lift_for_transaction
from outbox.broker.groups.offsets import newest_offset

_TOPICS: Final = Statement("SELECT topic_id, name FROM {schema}.topic WHERE retry_of IS NULL ORDER BY name")
_SNAPSHOT: Final = Statement("SELECT snapshot::text FROM {schema}.tick ORDER BY tick_id DESC LIMIT 1")

# One row per topic and term. `unsequenced`: the committed messages whose decision the last tick could not see. The last
# SELECT adds the messages that retention has removed.
_TERMS: Final = Statement("""
WITH decided AS MATERIALIZED (
    SELECT log.topic_id, op.decision,
           NOT pg_visible_in_snapshot(op.xid, %(snapshot)s::pg_snapshot) AS unread
    FROM {schema}.op_log op CROSS JOIN LATERAL unnest(op.log_ids) AS one (log_id)
    JOIN {schema}.commit_log log USING (log_id)
), open AS MATERIALIZED (
    SELECT log.topic_id, pending.parked_at IS NOT NULL AS parked
    FROM {schema}.commit_log log LEFT JOIN {schema}.pending_check pending USING (transaction_id)
    WHERE half AND NOT EXISTS (SELECT FROM {schema}.op_log op WHERE op.transaction_id = log.transaction_id)
)
SELECT topic_id, 'sent', count(*) FROM {schema}.commit_log GROUP BY topic_id
UNION ALL SELECT topic_id, 'committed', count(*) FROM decided WHERE decision = 'C' GROUP BY topic_id
UNION ALL SELECT topic_id, 'rolled_back', count(*) FROM decided WHERE decision = 'R' GROUP BY topic_id
UNION ALL SELECT topic_id, 'unsequenced', count(*) FROM decided WHERE decision = 'C' AND unread GROUP BY topic_id
UNION ALL SELECT topic_id, 'undecided', count(*) FROM open WHERE NOT parked GROUP BY topic_id
UNION ALL SELECT topic_id, 'parked', count(*) FROM open WHERE parked GROUP BY topic_id
UNION ALL SELECT topic_id, 'held', count(*) FROM {schema}.held GROUP BY topic_id
UNION ALL
SELECT topic_id, 'scheduled', count(*)
FROM {schema}.scheduled JOIN {schema}.commit_log USING (log_id) WHERE queue_id IS NULL GROUP BY topic_id
UNION ALL
SELECT topic_id, 'recalled', count(*) FROM {schema}.recalled JOIN {schema}.commit_log USING (log_id) GROUP BY topic_id
UNION ALL
SELECT topic_id, 'queued', count(*)
FROM {schema}.consume_queue JOIN {schema}.queue USING (queue_id) JOIN {schema}.topic USING (topic_id)
WHERE retry_of IS NULL GROUP BY topic_id
UNION ALL
SELECT topic_id, term, sum(pruned)
FROM {schema}.pruned CROSS JOIN LATERAL (VALUES ('sent', sent), ('committed', committed),
    ('rolled_back', rolled_back), ('recalled', recalled), ('queued', queued)) AS terms (term, pruned)
GROUP BY topic_id, term
""")

# One row per group. `queued` is computed from the queue heads in the ticks and the group's start offsets. `lag` has no
# entries that were finished ahead: these are counted as retrying, claimed, dead or timed out. `missed`: messages
# that retention removed before the group had passed them; when consumers of the group run again, it counts them as
# expired. `discarded` also counts entries that a reset has let the group read again, and that have failed while the
# message waits for the same attempt already or is a dead letter already.
_GROUPS: Final = Statement(f"""
WITH heads AS MATERIALIZED (
    SELECT DISTINCT ON (queue_id) queue_id, head
    FROM {{schema}}.tick CROSS JOIN LATERAL unnest(queue_ids, heads) AS moved (queue_id, head)
    WHERE tick_id >= (SELECT max(tick_id) FROM {{schema}}.tick WHERE is_full)
    ORDER BY queue_id, tick_id DESC
), place AS (
    SELECT group_id, topic_id, false AS is_retry FROM {{schema}}.subscription
    UNION ALL
    SELECT retry_of, topic_id, true FROM {{schema}}.topic WHERE retry_of IS NOT NULL
), counted AS (
    SELECT place.group_id, place.is_retry, coalesce(heads.head, 0) AS head, newest.*,
           greatest(0, queue.floor - newest.next_offset) AS missed,
           (SELECT count(*) FROM {{schema}}.consume_queue entry
            WHERE entry.queue_id = queue.queue_id
              AND entry.queue_offset >= greatest(newest.next_offset, queue.floor))
           - (SELECT count(*) FROM {{schema}}.finished_ahead ahead
              WHERE ahead.group_id = place.group_id AND ahead.queue_id = queue.queue_id
                AND ahead.queue_offset >= greatest(newest.next_offset, queue.floor)) AS waiting,
           (SELECT count(*) FROM {{schema}}.scheduled
            WHERE scheduled.queue_id = queue.queue_id AND NOT claimed) AS scheduled,
           (SELECT count(*) FROM {{schema}}.scheduled WHERE scheduled.queue_id = queue.queue_id AND claimed) AS claimed
    FROM place JOIN {{schema}}.queue USING (topic_id)
    LEFT JOIN heads USING (queue_id)
    CROSS JOIN LATERAL (
        SELECT start_offset, next_offset, handled, filtered, skipped, expired, moved
        FROM {newest_offset("place.group_id", "queue.queue_id")} AS stored
        UNION ALL
        SELECT 0, 0, 0, 0, 0, 0, 0
        WHERE NOT EXISTS (SELECT FROM {{schema}}.consumer_offset stored
                          WHERE stored.group_id = place.group_id AND stored.queue_id = queue.queue_id)) AS newest
)
SELECT consumer_group.name, consumer_group.broadcast,
       coalesce(sum(head - start_offset - moved) FILTER (WHERE NOT is_retry), 0)::bigint AS queued,
       coalesce(sum(handled), 0)::bigint AS handled, coalesce(sum(skipped), 0)::bigint AS skipped,
       coalesce(sum(filtered), 0)::bigint AS filtered,
       coalesce(sum(waiting) FILTER (WHERE NOT is_retry), 0)::bigint AS lag,
       coalesce(sum(claimed), 0)::bigint AS claimed,
       coalesce(sum(scheduled + waiting) FILTER (WHERE is_retry), 0)::bigint AS retrying,
       (SELECT count(*) FROM {{schema}}.dead_letter
        WHERE dead_letter.group_id = consumer_group.group_id AND replayed_at IS NULL) AS dead,
       coalesce((SELECT sum(discarded) FROM {{schema}}.subscription
                 WHERE subscription.group_id = consumer_group.group_id), 0)::bigint AS discarded,
       coalesce(sum(expired + missed), 0)::bigint AS expired, coalesce(sum(missed), 0)::bigint AS missed,
       (SELECT coalesce(sum(recalled), 0)::bigint FROM {{schema}}.subscription
        WHERE subscription.group_id = consumer_group.group_id) AS recalled,
       (SELECT coalesce(sum(timed_out), 0)::bigint FROM {{schema}}.subscription
        WHERE subscription.group_id = consumer_group.group_id) AS timed_out
FROM {{schema}}.consumer_group LEFT JOIN counted USING (group_id)
GROUP BY consumer_group.group_id ORDER BY consumer_group.name
""")


# Each term on the left is the sum of those on the right.
_OF_TOPICS: Final[Mapping[str, Sequence[str]]] = {
    "sent": ("committed", "rolled_back", "undecided", "parked"),
    "committed": ("unsequenced", "held", "scheduled", "recalled", "queued"),
}
_OF_GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "queued": (
        *("handled", "skipped", "filtered", "lag", "claimed", "retrying", "dead", "discarded", "expired", "recalled"),
        "timed_out",
    ),
}
_NOTHING: Final = dict.fromkeys(["sent", *_OF_TOPICS["sent"], *_OF_TOPICS["committed"]], 0)
_WORDS: Final = {"rolled_back": "rolled back", "lag": "lagging", "timed_out": "timed out"}


@dataclass(frozen=True, slots=True)
class MessageCounts:
    """The counts of a broker's messages in one snapshot: by topic name, and by group name, each with all terms."""

    topics: dict[str, Row]
    groups: dict[str, Row]

    def differences(self) -> list[str]:
        """Return a text for each equation that does not hold, with its topic or group."""
        of_topics = (f"topic {name!r}: {text}" for name, one in self.topics.items() for text in _wrong(one, _OF_TOPICS))
        # A broadcast group has no positions and no equation.
        groups = {name: one for name, one in self.groups.items() if not one.broadcast}
        of_groups = (f"group {name!r}: {text}" for name, one in groups.items() for text in _wrong(one, _OF_GROUPS))
        return [*of_topics, *of_groups]


def _wrong(counted: Row, equations: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for whole, terms in equations.items():
        said, found = getattr(counted, whole), sum(getattr(counted, term) for term in terms)
        if said != found:
            *some, last = (_WORDS.get(term, term) for term in terms)
            yield f"{said} {whole}, but {found} {', '.join(some)} or {last}"


def count_messages(run: Executor) -> MessageCounts:
    """Count all retained messages in one snapshot, on an autocommit connection outside a transaction."""
    with _one_snapshot(run.connection):
        [snapshot] = run.one(_SNAPSHOT)
        totals: dict[int, Row] = {}
        for topic_id, term, count in run.rows(_TERMS, {"snapshot": snapshot}):
            topic = totals.setdefault(topic_id, Row(**_NOTHING))
            setattr(topic, term, getattr(topic, term) + int(count))
        topics = {name: totals.get(topic_id, Row(**_NOTHING)) for topic_id, name in run.rows(_TOPICS)}
        return MessageCounts(topics, {group.name: group for group in run.objects(Row, _GROUPS)})


@contextmanager
def _one_snapshot(connection: Connection) -> Iterator[None]:
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        lift_for_transaction(connection)
        yield
    finally:
        connection.rollback()


_KEPT: Final = 100

_STORE: Final = Statement("""
INSERT INTO {schema}.audit (took_seconds, differences, facts)
VALUES (%(took)s, %(differences)s, %(facts)s::text::jsonb)
RETURNING at::text
""")
_TRIM: Final = Statement("""
DELETE FROM {schema}.audit WHERE audit_id <= (SELECT max(audit_id) FROM {schema}.audit) - %(kept)s
""")
_LAST: Final = Statement("""
SELECT at::text, extract(epoch FROM clock_timestamp() - at)::double precision AS age_seconds, took_seconds, differences,
       facts
FROM {schema}.audit ORDER BY audit_id DESC LIMIT 1
""")


@dataclass(frozen=True, slots=True)
class Audit:
    """One audit. `facts` has the terms of the equations per topic and per group, `differences` what does not hold."""

    at: str
    age_seconds: float
    took_seconds: float
    differences: list[str]
    facts: dict[str, Any]


def run_once(run: Executor) -> Audit:
    """Count every retained message, check the equations, and store the result, as `count_messages` does.

    It takes about a second per million messages. Nothing waits for it, but it keeps one snapshot open until its end.
    """
    started = time.monotonic()
    counted = count_messages(run)
    took = time.monotonic() - started
    differences = counted.differences()
    facts = {
        "topics": {name: vars(topic) for name, topic in counted.topics.items()},
        "groups": {
            name: {term: value for term, value in vars(group).items() if type(value) is int}
            for name, group in counted.groups.items()
        },
    }
    [at] = run.one(_STORE, {"took": took, "differences": differences, "facts": json.dumps(facts)})
    run.execute(_TRIM, {"kept": _KEPT})
    return Audit(at, 0.0, took, differences, facts)


def last(run: Executor) -> Audit | None:
    """Return the newest stored result; None before the first audit."""
    return next(iter(run.objects(Audit, _LAST)), None)
