"""Find messages by business key, topic and time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """A stored message. `state`: committed, rolled back, recalled, parked or undecided."""

    log_id: int
    message_id: UUID
    transaction_id: UUID
    topic: str
    key: str
    tag: str
    stored_at: datetime
    state: str


# The state of the stored message `log`, from its decision, check and recall.
STATE: Final = """CASE WHEN recalled.log_id IS NOT NULL THEN 'recalled' WHEN op.decision = 'C' THEN 'committed'
            WHEN op.decision = 'R' THEN 'rolled back' WHEN pending.parked_at IS NOT NULL THEN 'parked'
            ELSE 'undecided' END"""

# There is no index by key: it would cost every message. For a span of time, the index by time finds the blocks.
_FOUND: Final = Statement(f"""
SELECT log.log_id, log.message_id, log.transaction_id, topic.name AS topic, log.key, log.tag, log.stored_at,
       {STATE} AS state
FROM {{schema}}.commit_log log JOIN {{schema}}.topic USING (topic_id)
LEFT JOIN {{schema}}.op_log op USING (transaction_id)
LEFT JOIN {{schema}}.pending_check pending USING (transaction_id)
LEFT JOIN {{schema}}.recalled ON recalled.log_id = log.log_id
WHERE (%(key)s::text IS NULL OR log.key = %(key)s) AND (%(topic)s::text IS NULL OR topic.name = %(topic)s)
  AND log.stored_at >= coalesce(%(since)s::timestamptz, now() - interval '1 day')
  AND (%(until)s::timestamptz IS NULL OR log.stored_at < %(until)s)
  AND (%(before)s::bigint IS NULL OR log.log_id < %(before)s)
ORDER BY log.log_id DESC LIMIT %(limit)s
""")


def find_messages(
    run: Executor,
    key: str | None = None,
    topic: str | None = None,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    before: int | None = None,
    limit: int = 100,
) -> list[FoundMessage]:
    """Return a page of the messages with a key, of a topic, or of all, the newest first.

    `since` (None: the last day) is inclusive and `until` exclusive; both are times of storing. The next page is
    `before` the last log id of this one. It reads all messages stored in that time: seconds per ten million.
    """
    values = {"key": key, "topic": topic, "since": since, "until": until, "before": before, "limit": limit}
    # Not prepared: the plan must see the length of the time.
    return run.objects(FoundMessage, _FOUND, values, prepare=False)
