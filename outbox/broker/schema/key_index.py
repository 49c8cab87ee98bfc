"""Indexes of keys: one for each searchable topic, in commit_log.

An index of all keys would cost every message 6 µs of the server's CPU and 131 bytes of WAL. The installation builds
them with CONCURRENTLY after the schema, because a schema change is one transaction that locks the log. A table of keys
would be a further statement per message, and a hash index walks all pages of a hot key for each new row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from psycopg import sql

from outbox.broker.database.executor import Executor, Row
from outbox.broker.database.statement import Statement

logger = logging.getLogger(__name__)

_PREFIX: Final = "commit_log_key_of_"

# The declared topics and the existing indexes. An index without a topic has no name of a topic.
# `is_growing`: a session builds the index now.
_STATES: Final = Statement(r"""
WITH existing AS (
    SELECT substring(relname FROM '^commit_log_key_of_(\d+)$')::integer AS topic_id, indisvalid,
           EXISTS (SELECT FROM pg_stat_progress_create_index WHERE index_relid = indexrelid) AS is_growing
    FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
    WHERE indrelid = '{schema}.commit_log'::regclass AND relname ~ '^commit_log_key_of_\d+$'
), searchable AS (
    SELECT topic_id, name FROM {schema}.topic WHERE searchable AND deleted_at IS NULL
)
SELECT topic_id, coalesce(name, '') AS topic, name IS NOT NULL AS is_wanted, indisvalid IS NOT NULL AS exists,
       coalesce(indisvalid, false) AS is_valid, coalesce(is_growing, false) AS is_growing
FROM existing FULL JOIN searchable USING (topic_id) ORDER BY topic_id
""")


def missing(run: Executor) -> list[str]:
    """Return the searchable topics that have no complete index."""
    return [one.topic for one in run.objects(Row, _STATES) if one.is_wanted and not one.is_valid]


def adapt(run: Executor, *, report: Callable[[str], None] = logger.warning) -> None:
    """Build the index of each searchable topic, and drop the indexes of all other topics.

    Publishers do not wait for it; a build waits for the transactions that are open when it begins. The connection must
    be in autocommit, and its role must own commit_log. An interrupted build leaves an invalid index, which the next
    call builds anew.
    """
    for one in run.objects(Row, _STATES):
        if one.is_growing or (one.is_wanted and one.is_valid):
            continue
        names = {
            "index": sql.Identifier(run.schema, f"{_PREFIX}{one.topic_id}"),
            "name": sql.Identifier(f"{_PREFIX}{one.topic_id}"),
            "log": sql.Identifier(run.schema, "commit_log"),
            "topic_id": sql.Literal(one.topic_id),
        }
        if one.exists:
            run.connection.execute(sql.SQL("DROP INDEX CONCURRENTLY IF EXISTS {index}").format(**names))
        if one.is_wanted:
            report(f"building the index of the keys of topic {one.topic!r}; this waits for transactions that are open")
            build = "CREATE INDEX CONCURRENTLY IF NOT EXISTS {name} ON {log} (key) WHERE topic_id = {topic_id}"
            run.connection.execute(sql.SQL(build).format(**names))
