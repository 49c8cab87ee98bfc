"""Replace times that are in the future, because the server's clock was ahead when they were written.

After the clock is set back, an undecided transaction would be checked, and a retry delivered, only at these times. Only
a retry that is due in more than 366 days is replaced: an earlier one may have a wait that its policy allows.
"""

from __future__ import annotations

from typing import Final

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.database.timeouts import lifted
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident, IncidentKind
from outbox.names import MAX_DELAY_SECONDS

# Of two servers, the clocks may differ by less. The immunity of a transaction begins anew. The next passes replace what
# is above the limit.
_TRANSACTIONS: Final = Statement("""
WITH ahead AS MATERIALIZED (
    SELECT transaction_id, stored_at,
           CASE WHEN isfinite(stored_at) THEN immune_until - stored_at ELSE interval '1 minute' END AS immunity
    FROM {schema}.pending_check WHERE stored_at > now() + interval '1 minute'
    ORDER BY transaction_id LIMIT 10000 FOR UPDATE SKIP LOCKED
), replaced AS (
    UPDATE {schema}.pending_check pending
    SET stored_at = now(), immune_until = now() + immunity, due_at = now() + immunity
    FROM ahead WHERE pending.transaction_id = ahead.transaction_id
)
SELECT count(*), max(stored_at)::text FROM ahead
""")

# No retry waits longer.
_RETRIES: Final = Statement("""
WITH ahead AS MATERIALIZED (
    SELECT schedule_id, due_at FROM {schema}.scheduled
    WHERE queue_id IS NOT NULL AND due_at > now() + make_interval(secs => %(longest)s)
    ORDER BY schedule_id FOR UPDATE SKIP LOCKED
), replaced AS (
    UPDATE {schema}.scheduled SET due_at = now() FROM ahead WHERE scheduled.schedule_id = ahead.schedule_id
)
SELECT count(*), max(due_at)::text FROM ahead
""")


def mend(run: Executor) -> None:
    """Let undecided transactions and retries count from now, if their times are in the future. Record an incident."""
    found = []
    for subject, statement in (("undecided transactions", _TRANSACTIONS), ("retries", _RETRIES)):
        with lifted(run.connection):
            count, newest = run.one(statement, {"longest": float(MAX_DELAY_SECONDS)})
        if count:
            detail = (
                f"{count} rows had times in the future, up to {newest}, and count from now on: the server's clock was "
                "ahead when they were written. Compare the clocks of the servers (NTP)"
            )
            found.append(Incident(IncidentKind.CLOCK, subject, detail))
    incidents.record(run, found)
