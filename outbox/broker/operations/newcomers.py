"""Consumer groups that are about to start on a topic with a history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outbox.broker.database.arrays import texts
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.groups.offsets import newest_offset


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A group without a subscription to a topic that has about `messages` messages in its queues.

    The groups `handled_by` have handled some of them. The groups `without_consumers` are those among them whose
    consumers are not alive.
    """

    group: str
    topic: str
    messages: int
    handled_by: list[str]
    without_consumers: list[str]


# It reads the ends of every queue, and the position of each group: as much work on a long topic as on a short one.
_NEWCOMERS = Statement(
    """
WITH wanted AS (
    SELECT given.consumer_group, topic.topic_id, topic.name
    FROM unnest(%(groups)s::text[], %(topics)s::text[]) AS given (consumer_group, topic)
    JOIN {schema}.topic ON topic.name = given.topic
    WHERE NOT EXISTS (SELECT FROM {schema}.subscription known JOIN {schema}.consumer_group USING (group_id)
                      WHERE known.topic_id = topic.topic_id AND consumer_group.name = given.consumer_group)
), handled AS (
    SELECT of_topic.topic_id, consumer_group.name,
           EXISTS (SELECT FROM {schema}.consumer
                   WHERE consumer.group_id = consumer_group.group_id AND expires_at > clock_timestamp()) AS is_alive
    FROM (SELECT DISTINCT topic_id FROM wanted) AS of_topic
    JOIN {schema}.subscription USING (topic_id) JOIN {schema}.consumer_group USING (group_id)
    WHERE EXISTS (
        SELECT FROM {schema}.queue
        CROSS JOIN LATERAL """
    + newest_offset("consumer_group.group_id", "queue.queue_id")
    + """ AS position
        WHERE queue.topic_id = of_topic.topic_id
          AND position.next_offset > greatest(queue.floor, position.start_offset))
)
SELECT wanted.consumer_group AS group, wanted.name AS topic,
       (SELECT coalesce(sum(newest.queue_offset + 1 - queue.floor), 0)::bigint
        FROM {schema}.queue
        CROSS JOIN LATERAL (SELECT queue_offset FROM {schema}.consume_queue entry
                            WHERE entry.queue_id = queue.queue_id AND entry.queue_offset >= queue.floor
                            ORDER BY queue_offset DESC LIMIT 1) AS newest
        WHERE queue.topic_id = wanted.topic_id) AS messages,
       array_agg(handled.name ORDER BY handled.name) AS handled_by,
       coalesce(array_agg(handled.name ORDER BY handled.name) FILTER (WHERE NOT is_alive), '{{}}') AS without_consumers
FROM wanted JOIN handled USING (topic_id)
GROUP BY wanted.consumer_group, wanted.name, wanted.topic_id
ORDER BY wanted.consumer_group, wanted.name
"""
)


def newcomers(run: Executor, wanted: Sequence[tuple[str, str]]) -> list[Newcomer]:
    """Return the pairs of group and topic that are new to each other, if other groups have handled the topic."""
    if not wanted:
        return []
    groups, topics = zip(*wanted, strict=True)
    return run.objects(Newcomer, _NEWCOMERS, {"groups": texts(list(groups)), "topics": texts(list(topics))})
