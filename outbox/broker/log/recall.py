"""Recalling a message before its delivery time."""

from __future__ import annotations

from uuid import UUID

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

# Whoever deletes the scheduled row decides: the sequencer queues the message, or this statement takes it back.
_RECALL = Statement("""
WITH message AS (
    SELECT log_id FROM {schema}.commit_log WHERE message_id = %(message_id)s
), taken AS (
    DELETE FROM {schema}.scheduled WHERE log_id = (SELECT log_id FROM message) AND queue_id IS NULL RETURNING log_id
)
INSERT INTO {schema}.recalled (log_id) SELECT log_id FROM taken RETURNING log_id
""")


def recall(run: Executor, message_id: UUID) -> bool:
    """Take back a decided message that is not due yet; False when it is queued already, undecided or unknown."""
    return run.row(_RECALL, {"message_id": message_id}) is not None
