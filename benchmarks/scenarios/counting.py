"""What the tables say about a run: orders without an effect, orders with several, times from commit to commit.

The server's `track_commit_timestamp` is on, so an order counts from its COMMIT, whatever its producer was told.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

import psycopg

_EFFECTS = """
WITH effect AS (
    SELECT order_id, min(pg_xact_commit_timestamp(xmin)) AS at, count(*) AS times FROM scenario_effect GROUP BY order_id
)
"""
_COUNT = f"""
{_EFFECTS}
SELECT count(scenario_order.id), count(*) FILTER (WHERE order_id IS NULL), count(*) FILTER (WHERE times > 1),
       count(*) FILTER (WHERE scenario_order.id IS NULL),
       percentile_disc(0.99) WITHIN GROUP (
           ORDER BY extract(epoch FROM effect.at - pg_xact_commit_timestamp(scenario_order.xmin))::float8 * 1000
       ) FILTER (WHERE order_id IS NOT NULL AND pg_xact_commit_timestamp(scenario_order.xmin) >= %s)
FROM scenario_order FULL JOIN effect ON order_id = scenario_order.id
"""
_IN_TIME = f"{_EFFECTS} SELECT count(*) FROM effect WHERE at >= %s AND at < %s"
_MISSING = """
SELECT count(*) FILTER (WHERE order_id IS NULL), (SELECT max(at) FROM scenario_effect)
FROM scenario_order LEFT JOIN scenario_effect ON order_id = id
"""
_CHANGED = """
SELECT relname, (n_tup_upd + n_tup_del)::bigint FROM pg_stat_user_tables
WHERE relname NOT IN ('scenario_order', 'scenario_effect') AND n_tup_upd + n_tup_del > 0
"""


@dataclass(frozen=True)
class Counted:
    """Orders that committed; those without an effect; those with several; effects without an order; milliseconds."""

    orders: int
    lost: int
    twice: int
    phantoms: int
    p99_ms: float


def count(connection: psycopg.Connection, since: datetime) -> Counted:
    """The p99 is of the orders that committed since then."""
    orders, lost, twice, phantoms, p99 = connection.execute(_COUNT, [since]).fetchall()[0]
    return Counted(orders, lost, twice, phantoms, p99 if p99 is not None else float("nan"))


def rate(connection: psycopg.Connection, began: datetime, ended: datetime) -> float:
    """Orders per second whose first effect committed in this time."""
    (effects,) = connection.execute(_IN_TIME, [began, ended]).fetchall()[0]
    return float(effects) / (ended - began).total_seconds()


def missing(connection: psycopg.Connection) -> tuple[int, datetime | None]:
    """How many orders have no effect yet, and when the last effect was written."""
    orders, last = connection.execute(_MISSING).fetchall()[0]
    return orders, last


def changed_rows(connection: psycopg.Connection) -> Counter[str]:
    """Rows of the system's tables, by table, that were updated or deleted until now: each leaves a dead row behind."""
    return Counter(dict(connection.execute(_CHANGED).fetchall()))
