"""Conditions of consumer groups: no consumer, lag, blocked, failing; and of messages that retention leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.log import failing as failing_parts
from outbox.broker.log.failing import ProcessPart
from outbox.broker.operations import summary as summaries
from outbox.broker.operations.conditions import EVIDENCE, Condition, Fact, Judged, Severity, condition
from outbox.broker.operations.summary import GroupProgress, Summary
from outbox.broker.operations.thresholds import Thresholds

_RATE_WINDOW_SECONDS: Final = 60.0

# Broadcast groups store no positions: if none of their instances runs, no message waits. A consumer that leaves
# releases its leases, and their `expires_at` is that moment; it is null if the group has never consumed the topic.
_NO_WORKER: Final = Statement("""
WITH alive AS MATERIALIZED (
    SELECT DISTINCT group_id, unnest(topics) AS topic FROM {schema}.consumer WHERE expires_at > clock_timestamp()
)
SELECT consumer_group.name AS group, topic.name AS topic,
       extract(epoch FROM clock_timestamp() - greatest(
           (SELECT max(lease.expires_at) FROM {schema}.queue_lease lease JOIN {schema}.queue USING (queue_id)
            WHERE lease.group_id = subscription.group_id AND queue.topic_id = subscription.topic_id),
           (SELECT max(gone.expires_at) FROM {schema}.consumer gone
            WHERE gone.group_id = subscription.group_id AND topic.name = ANY (gone.topics))
       ))::double precision AS seconds
FROM {schema}.subscription JOIN {schema}.consumer_group USING (group_id) JOIN {schema}.topic USING (topic_id)
LEFT JOIN alive ON alive.group_id = subscription.group_id AND alive.topic = topic.name
WHERE alive.topic IS NULL AND NOT broadcast
ORDER BY consumer_group.name, topic.name
""")

_STOPPED: Final = Statement("""
SELECT consumer_group.name, topic.name, queue.number, lease.stopped
FROM {schema}.queue_lease lease JOIN {schema}.consumer_group USING (group_id) JOIN {schema}.queue USING (queue_id)
JOIN {schema}.topic USING (topic_id)
WHERE stopped IS NOT NULL ORDER BY 1, 2, 3
""")


def rules(run: Executor, limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    """Return all conditions of this module."""
    yield from _no_worker(run, limits, summary.groups)
    yield from _lag(limits, summary)
    yield from condition(
        "stopped_queue",
        [
            (Severity.CRITICAL, {"group": group, "topic": topic, "queue": number, "error": error})
            for group, topic, number, error in run.rows(_STOPPED)
        ],
    )
    blocked = sum(one.blocked for one in summary.groups)
    for found in condition("blocked_queue", [(Severity.CRITICAL, _blocked(one, summary)) for one in summary.blocked]):
        yield Condition(found.name, found.severity, found.evidence, max(blocked, found.count))
    yield from _dead_letters(limits, summary)
    yield from _retry_storms(run, limits)
    yield from condition(
        "retention_behind",
        [
            (limits.retention_behind_seconds.judge(behind), {"topic": topic.topic, "behind_seconds": behind})
            for topic in summary.topics
            if (behind := summary.seconds_since(topic.behind_since)) is not None
        ],
    )


def _no_worker(run: Executor, limits: Thresholds, groups: Iterable[GroupProgress]) -> Iterator[Condition]:
    lags = {(one.group, one.topic): one.lag for one in groups}
    by_group: dict[str, dict[str, float | None]] = {}
    rows = run.rows(_NO_WORKER)
    # If a consumer runs and fails, `process_failing` reports it: another worker would not help.
    failing = (
        [one for one in failing_parts.failing(run) if one.part in (ProcessPart.CONSUMING, ProcessPart.LEASES)]
        if rows
        else []
    )
    for group, topic, seconds in rows:
        if not any(one.works_for(group) for one in failing):
            by_group.setdefault(group, {})[topic] = seconds
    judged: list[Judged] = []
    for group, topics in by_group.items():
        lag = sum(lags.get((group, topic), 0) for topic in topics)
        shown = ", ".join(list(topics)[:EVIDENCE]) + (" …" if len(topics) > EVIDENCE else "")
        known = [seconds for seconds in topics.values() if seconds is not None]
        # A topic that the group has never consumed waits since its first message.
        since = None if len(known) < len(topics) else max(known)
        severity = Severity.CRITICAL if since is None else limits.no_worker_seconds.judge(since)
        if severity and not lag:
            severity = Severity.WARNING
        judged.append((severity, {"group": group, "topics": shown, "lag": lag, "without_worker_seconds": since}))
    yield from condition("no_worker", judged)


def _lag(limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    behind: list[Judged] = []
    paused: list[Judged] = []
    for one in sorted(summary.groups, key=lambda one: one.oldest_at or summary.now):
        if not one.lag:
            continue
        age = summary.seconds_since(one.oldest_at)
        severity = max(filter(None, (limits.lag_seconds.judge(age), limits.lag_messages.judge(one.lag))), default=None)
        fact: Fact = {"group": one.group, "topic": one.topic, "messages": one.lag, "oldest_seconds": age}
        if one.paused:
            paused.append((Severity.WARNING, fact))
        else:
            behind.append((severity, fact))
    yield from condition("lag", behind)
    yield from condition("group_paused", paused)


def _blocked(one: summaries.BlockedQueue, summary: Summary) -> Fact:
    return {
        "group": one.group,
        "topic": one.topic,
        "queue": one.queue,
        "message": one.message,
        "key": one.key,
        "blocked_seconds": summary.seconds_since(one.since),
        "error": one.error,
    }


def _dead_letters(limits: Thresholds, summary: Summary) -> Iterator[Condition]:
    window = limits.window_seconds.warning or 0.0
    yield from condition(
        "dead_letters",
        [
            (limits.dead_letters.judge(one.dead), {"group": one.group, "unsettled": one.dead, "newest_seconds": age})
            for one in summary.rests
            if (age := summary.seconds_since(one.newest_dead_at)) is not None and age <= window
        ],
    )


def _retry_storms(run: Executor, limits: Thresholds) -> Iterator[Condition]:
    judged: list[Judged] = []
    for one in summaries.growth(run, window_seconds=_RATE_WINDOW_SECONDS):
        finished = one.handled + one.sent_back + one.dead
        if finished and limits.retry_messages.judge(one.sent_back):
            share = one.sent_back / finished
            fact: Fact = {
                "group": one.group,
                "sent_back": one.sent_back,
                "share": round(share, 3),
                "seconds": one.seconds,
            }
            judged.append((limits.retry_share.judge(share), fact))
    yield from condition("retry_storm", judged)
