"""The retry queues of a group: one per topic, made at the first failure of one of its messages.

Processes of one group may subscribe to different topics. With one retry queue per topic, each topic's retries go to a
process that knows the topic. The queues belong to the group's retry topic; their number is the id of the topic they
serve. Number 0 carries all topics: version 0.1 made and filled it. Consumers drain it unchanged (docs/decisions/071).
"""

from __future__ import annotations

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.groups import offsets
from outbox.errors import UnknownGroup

# A process that makes queues of a group, or registers with it, waits here for the others.
_LOCK_GROUP = Statement("SELECT name FROM {schema}.consumer_group WHERE group_id = %(group_id)s FOR NO KEY UPDATE")
_ADD_TOPIC = Statement("""
INSERT INTO {schema}.topic (name, message_types, queue_count, retry_of)
VALUES ('%%RETRY%%' || %(name)s, ARRAY['NORMAL', 'DELAY'], 1, %(group_id)s)
ON CONFLICT (name) DO NOTHING
""")
_ADD_QUEUE = Statement("""
INSERT INTO {schema}.queue (topic_id, number)
SELECT topic_id, %(of_topic)s FROM {schema}.topic WHERE retry_of = %(group_id)s
ON CONFLICT (topic_id, generation, number) DO NOTHING
RETURNING queue_id
""")
_FIND = Statement("""
SELECT queue.queue_id FROM {schema}.queue JOIN {schema}.topic USING (topic_id)
WHERE topic.retry_of = %(group_id)s AND queue.number = %(of_topic)s
""")


def ensure(run: Executor, group_id: int, topic_id: int) -> int:
    """Return the id of the queue for the group's retries of a topic, and make it if there is none.

    Raises UnknownGroup when the group was deleted meanwhile.
    """
    values = {"group_id": group_id, "of_topic": topic_id}
    found = run.row(_FIND, values)
    if found is not None:
        return int(found[0])
    with run.connection.transaction():
        group = run.row(_LOCK_GROUP, values)
        if group is None:
            raise UnknownGroup(f"consumer group {group_id} was deleted: restart its consumers.")
        run.execute(_ADD_TOPIC, {"name": group[0], "group_id": group_id})
        made = run.row(_ADD_QUEUE, values)
        if made is None:
            return int(run.one(_FIND, values)[0])
        offsets.store_starts(run, group_id, {made[0]: 0})
        return int(made[0])
