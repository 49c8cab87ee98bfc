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
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.operations.dead_letters import LetterSelection, replay
from outbox.errors import BrokerUnavailable
from outbox.utils.faults import point
from outbox.utils.periodic import BackgroundLoop

# The time between two looks of the leader (seconds).
_LOOK_SECONDS: Final = 1.0
# While messages are released, the time between two steps, and for how long the thread waits for the next one (seconds).
_STEP_SECONDS: Final = 0.05
_WAIT_SECONDS: Final = 2.0

_FINISH: Final = Statement("""
DELETE FROM {schema}.blocking_message b
WHERE state = 'settled' AND NOT EXISTS (
    SELECT FROM {schema}.topic t
    JOIN {schema}.queue q ON q.topic_id = t.topic_id AND q.number = b.topic_id
    WHERE t.retry_of = b.group_id AND (
        EXISTS (SELECT FROM {schema}.scheduled s WHERE s.log_id = b.log_id AND s.queue_id = q.queue_id)
        OR EXISTS (
            SELECT FROM {schema}.consume_queue c
            WHERE c.queue_id = q.queue_id AND c.log_id = b.log_id AND c.queue_offset >= coalesce((
                SELECT next_offset FROM {schema}.consumer_offset o
                WHERE o.group_id = b.group_id AND o.queue_id = q.queue_id
                ORDER BY o.epoch DESC, o.ordinal DESC LIMIT 1
            ), 0)
        )
    )
)
""")
_FIRST_WAITS: Final = """
FROM (
    SELECT DISTINCT ON (group_id, topic_id, key) group_id, message_id, state FROM {schema}.blocking_message
    ORDER BY group_id, topic_id, key, place
) AS first
JOIN {schema}.consumer_group g USING (group_id)
WHERE state = 'waiting'
"""
_NEXT: Final = Statement("SELECT name, array_agg(message_id)" + _FIRST_WAITS + "GROUP BY name")
_LOOK: Final = Statement(
    "SELECT EXISTS (SELECT FROM {schema}.blocking_message WHERE state = 'settled') OR EXISTS (SELECT "
    + _FIRST_WAITS
    + ")"
)


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
        self.loop = BackgroundLoop(
            "blocked-keys",
            self._pass,
            every_seconds=_LOOK_SECONDS,
            first_seconds=None,
            expected=(psycopg.Error, BrokerUnavailable),
        )

    def look(self, run: Executor, now: float) -> None:
        """Wake the thread if a message may be released. `now`: the monotonic clock. Raises psycopg.Error."""
        if run.one(_LOOK)[0]:
            self.loop.wake()
        self.look_at = now + _LOOK_SECONDS

    def _pass(self, stopping: Callable[[], bool]) -> None:
        with (
            self._note.watching(),
            contextlib.closing(self._database.open(name="outbox-blocked-keys", direct=True)) as connection,
        ):
            run = Executor(connection, self._database.schema)
            until = time.monotonic() + _WAIT_SECONDS
            while not stopping() and time.monotonic() < until:
                if run_once(run):
                    until = time.monotonic() + _WAIT_SECONDS
                time.sleep(_STEP_SECONDS)
