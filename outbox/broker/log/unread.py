"""SQL fragments that read new log rows by snapshots: rows whose transaction the last reader could not see.

A cursor over ids would lose transactions that commit late. Using the oldest running transaction as a limit would stall
behind any open one. Readers bind the upper end of their last snapshot as `%(xmax)s` and its running transactions as
`%(xip)s`: as functions inside one OR they would cost a scan of the whole table.
"""

from __future__ import annotations

from typing import Final, LiteralString


def cut(table: LiteralString, messages: LiteralString, only: LiteralString = "") -> LiteralString:
    """Return a query for `cut`, the transaction id up to which to read: inside a long backlog, else the snapshot's end.

    About `%(batch)s` messages are below it. `messages` is the SQL for the number of messages of a row. The rows of one
    transaction stay together. `only` begins the condition and ends with AND. The current snapshot bounds the query,
    because rows from before a restore may carry higher ids than the present ones.
    """
    return f"""
    SELECT coalesce(
        min(xid) FILTER (WHERE earlier >= %(batch)s),
        CASE WHEN sum(rows) > %(batch)s THEN
            (SELECT min(next.xid) FROM {{schema}}.{table} next WHERE {only} next.xid > max(per_xid.xid)
                AND next.xid < pg_snapshot_xmax(pg_current_snapshot())) END,
        pg_snapshot_xmax(pg_current_snapshot())) AS cut
    FROM (
        SELECT xid, count(*) AS rows, sum(sum(messages)) OVER (ORDER BY xid) - sum(messages) AS earlier
        FROM (SELECT xid, {messages} AS messages FROM {{schema}}.{table}
              WHERE {only} xid >= %(xmax)s::xid8 AND xid < pg_snapshot_xmax(pg_current_snapshot())
              ORDER BY xid LIMIT %(batch)s + 1) AS unread
        GROUP BY xid
    ) AS per_xid
"""


# The snapshot to store after reading up to `cut`: the current one, with everything from `cut` on unread.
SNAPSHOT_UP_TO_CUT: Final = """
(least(pg_snapshot_xmin(pg_current_snapshot()), cut)::text || ':' || cut::text || ':' ||
 coalesce((SELECT string_agg(xip::text, ',' ORDER BY xip)
           FROM pg_snapshot_xip(pg_current_snapshot()) AS xip WHERE xip < cut), ''))::pg_snapshot
"""
