"""The pending row: an undecided half transaction that waits for its check. Composed here for all who write one.

Immunity is what the half carries, else the setting of whoever finds it; it counts from when the half was stored.
"""

from __future__ import annotations

from typing import Final, LiteralString

_IMMUNE_UNTIL: Final = "stored_at + make_interval(secs => coalesce(immunity_seconds, %(immunity)s))"


def insert_pending(source: LiteralString, where: LiteralString, *, due: LiteralString = _IMMUNE_UNTIL) -> LiteralString:
    """Insert a pending row for each undecided transaction of half rows; due when immunity ends, unless said otherwise.

    `source` has the log's columns and the alias `half_row`. Sorted: inserts that may conflict must not meet crosswise.
    """
    return f"""
INSERT INTO {{schema}}.pending_check AS pending
    (transaction_id, log_id, producer_group, stored_at, immune_until, due_at)
SELECT transaction_id, log_id, coalesce(producer_group, ''), stored_at, {_IMMUNE_UNTIL}, {due}
FROM {source}
WHERE {where}
  AND NOT EXISTS (SELECT FROM {{schema}}.op_log WHERE op_log.transaction_id = half_row.transaction_id)
ORDER BY transaction_id
"""
