"""The pending row: an undecided half transaction that waits for its check. All writers use this SQL.

Immunity is the value of the half message, else the setting of the process that finds it. It counts from the time at
which the half message was stored.
"""

from __future__ import annotations

from typing import Final, LiteralString

_IMMUNE_UNTIL: Final = "stored_at + make_interval(secs => coalesce(immunity_seconds, %(immunity)s))"


def insert_pending(source: LiteralString, where: LiteralString, *, due: LiteralString = _IMMUNE_UNTIL) -> LiteralString:
    """Return the INSERT of a pending row for each undecided transaction, due when immunity ends or at `due`.

    `source` has the log's columns and the alias `half_row`. The rows are sorted: inserts that may conflict must lock in
    one order.
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
