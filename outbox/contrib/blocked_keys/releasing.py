"""The leader delivers the waiting messages of each key again, one after the other and in order.

The next message of a key is replayed after the group has finished the one before it: its entry is in neither the
scheduled messages nor the unfinished entries of the retry queue. Each step is one transaction on the broker's database,
so the next leader continues after a crash.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final

import psycopg

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Channel, notify
from outbox.broker.database.statement import Statement
from outbox.broker.groups.offsets import newest_offset
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.operations.dead_letters import LetterSelection, replay
from outbox.errors import BrokerUnavailable
from outbox.utils.faults import point
from outbox.utils.periodic import BackgroundLoop

# The seconds between two looks of the leader, and between two steps of a pass: at first, and at most if nothing moves.
_LOOK_SECONDS: Final = 1.0, 10.0
_STEP_SECONDS: Final = 0.05, 0.5

# With EXCEPT, because an anti-join that is planned with old statistics could compare all pairs of rows.
_FINISH: Final = Statement(
    """
WITH settled AS MATERIALIZED (
    SELECT group_id, topic_id, log_id FROM {schema}.blocking_message WHERE state = 'settled'
), retry AS MATERIALIZED (
    SELECT DISTINCT one.group_id, one.topic_id, queue_id FROM settled one
    JOIN {schema}.topic t ON retry_of = one.group_id
    JOIN {schema}.queue q ON q.topic_id = t.topic_id AND q.number = one.topic_id
), finished AS (
    SELECT group_id, log_id FROM settled
    EXCEPT
    SELECT group_id, log_id FROM settled JOIN retry USING (group_id, topic_id)
    JOIN {schema}.scheduled USING (log_id, queue_id)
    EXCEPT
    SELECT group_id, entry.log_id FROM retry
    CROSS JOIN LATERAL (SELECT log_id FROM {schema}.consume_queue
                        WHERE consume_queue.queue_id = retry.queue_id
                          AND queue_offset >= coalesce((SELECT next_offset FROM """
    + newest_offset("retry.group_id", "retry.queue_id")
    + """ AS newest), 0) OFFSET 0) AS entry
)
DELETE FROM {schema}.blocking_message b USING finished
WHERE b.group_id = finished.group_id AND b.log_id = finished.log_id AND b.state = 'settled'
"""
)
# Of each key, the first message that waits, if no message before it blocks the key.
_FIRST_WAITS: Final = """
FROM (
    SELECT DISTINCT ON (group_id, topic_id, key) group_id, topic_id, key, log_id, message_id
    FROM {schema}.blocking_message WHERE state = 'waiting' ORDER BY group_id, topic_id, key, log_id
) AS first
JOIN {schema}.consumer_group g USING (group_id)
WHERE NOT EXISTS (
    SELECT FROM {schema}.blocking_message b WHERE b.group_id = first.group_id AND b.topic_id = first.topic_id
      AND b.key = first.key AND b.log_id < first.log_id OFFSET 0
)
"""
_NEXT: Final = Statement("SELECT name, array_agg(message_id)" + _FIRST_WAITS + "GROUP BY name")
_SETTLED: Final = "SELECT EXISTS (SELECT FROM {schema}.blocking_message WHERE state = 'settled')"
_LOOK: Final = Statement(_SETTLED + " OR EXISTS (SELECT " + _FIRST_WAITS + ")")


def run_once(run: Executor) -> int:
    """Take one step for every key, on an autocommit connection. Return how many messages were finished or replayed."""
    moved = run.count(_FINISH)
    for group, message_ids in run.rows(_NEXT):
        point("blocked_keys.before_release")
        moved += replay(run, group, LetterSelection(message_ids=message_ids))
        point("blocked_keys.after_release")
        notify(run, Channel.DECIDED)
    return moved


class Releasing:
    """The leader's work on blocked keys: a look on the leader's own connection, and steps in a thread if one is due."""

    def __init__(self, database: BrokerDatabase) -> None:
        self._database = database
        self._note = FailureNote(database, ProcessPart.LEADER_WORK, of="blocked_keys")
        self.look_at = 0.0
        self._every_seconds = _LOOK_SECONDS[0]
        self.loop = BackgroundLoop(
            "blocked-keys",
            self._pass,
            every_seconds=_LOOK_SECONDS[0],
            first_seconds=None,
            expected=(psycopg.Error, BrokerUnavailable),
        )

    def look(self, run: Executor, now: float) -> None:
        """Wake the thread if a message may be released. `now`: the monotonic clock. Raises psycopg.Error."""
        if run.one(_LOOK)[0]:
            self.loop.wake()
        self.look_at = now + self._every_seconds

    def _pass(self, stopping: Callable[[], bool]) -> None:
        with (
            self._note.watching(),
            contextlib.closing(self._database.open(name="outbox-blocked-keys", direct=True)) as connection,
        ):
            run = Executor(connection, self._database.schema)
            self._every_seconds, wait = min(2 * self._every_seconds, _LOOK_SECONDS[1]), _STEP_SECONDS[0]
            while not stopping() and wait < _STEP_SECONDS[1]:
                if run_once(run):
                    self._every_seconds, wait = _LOOK_SECONDS[0], _STEP_SECONDS[0]
                time.sleep(wait)
                wait *= 2
