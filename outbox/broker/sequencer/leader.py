"""Leader election for a role of the broker.

The lease only saves work. Two sequencers at once are safe, because they collide on the tick. The lease expires by the
database's clock. The owner decides when to renew it by its own monotonic clock, counted from before the last renewal
was sent. A stand-in candidate leads only while no other candidate wants to: another one may take its lease at any time.
"""

from __future__ import annotations

import time
from typing import Final
from uuid import UUID

from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

DEFAULT_TERM_SECONDS: Final = 3.0
SEQUENCER: Final = "sequencer"

# A candidate that does not lead reads first, so it writes nothing while another one leads.
_REMAINING = Statement("""
SELECT CASE WHEN owner IS NULL OR owner = %(owner)s OR (stands_in AND NOT %(stands_in)s) THEN 0
            ELSE greatest(0, extract(epoch FROM expires_at - clock_timestamp())) END::double precision
FROM {schema}.leader_lease WHERE role = %(role)s
""")

# A lost renewal costs at most a change of leaders, so its commit does not wait for the disk.
_ACQUIRE = Statement("""
INSERT INTO {schema}.leader_lease AS held (role, owner, epoch, expires_at, stands_in)
SELECT %(role)s, %(owner)s, 1, clock_timestamp() + make_interval(secs => %(term)s), %(stands_in)s
FROM (SELECT set_config('synchronous_commit', 'off', true) AS synchronous_commit) AS relaxed
WHERE relaxed.synchronous_commit = 'off'
ON CONFLICT (role) DO UPDATE
SET owner = excluded.owner, expires_at = excluded.expires_at, stands_in = excluded.stands_in,
    epoch = held.epoch + (held.owner IS DISTINCT FROM excluded.owner)::integer
WHERE held.owner IS NULL OR held.owner = excluded.owner OR held.expires_at <= clock_timestamp()
   OR (held.stands_in AND NOT excluded.stands_in)
RETURNING epoch
""")

_RELEASE = Statement("""
UPDATE {schema}.leader_lease SET owner = NULL, expires_at = clock_timestamp()
WHERE role = %(role)s AND owner = %(owner)s
""")


def release_dead(run: Executor, owner: UUID) -> None:
    """Release the lease of a dead process before its end."""
    run.execute(_RELEASE, {"role": SEQUENCER, "owner": owner})


class LeaderLease:
    """One candidate for one role."""

    def __init__(
        self,
        schema: str,
        owner: UUID,
        *,
        role: str = SEQUENCER,
        term_seconds: float = DEFAULT_TERM_SECONDS,
        stands_in: bool = False,
    ) -> None:
        self._schema = schema
        self._parameters = {"role": role, "owner": owner, "term": term_seconds, "stands_in": stands_in}
        self._term = term_seconds
        self._renew_at = 0.0

    def hold(self, connection: Connection) -> float:
        """Acquire or renew the lease if it is time. Returns 0.0 for the leader, else seconds until the next attempt."""
        asked_at = time.monotonic()
        if asked_at < self._renew_at and not self._was_taken(connection):
            return 0.0
        leads, self._renew_at = self._renew_at > 0, 0.0
        run = Executor(connection, self._schema)
        if not leads:
            others = run.row(_REMAINING, self._parameters, prepare=True)
            if others is not None and others[0] > 0:
                return float(others[0])
        if run.row(_ACQUIRE, self._parameters, prepare=True) is None:
            return self._term
        self._renew_at = asked_at + self._term / 3
        return 0.0

    def _was_taken(self, connection: Connection) -> bool:
        """Whether a consumer process has taken the lease from this stand-in; it may do so at any time.

        A tick of both would collide, and PostgreSQL would log an error each time a worker starts.
        """
        if not self._parameters["stands_in"]:
            return False
        others = Executor(connection, self._schema).row(_REMAINING, self._parameters, prepare=True)
        return others is not None and others[0] > 0

    def ask_again(self) -> None:
        """Ask again at the next `hold`, because another process acts as the leader."""
        self._renew_at = 0.0

    def release(self, connection: Connection) -> None:
        """Release the lease, so that another candidate leads at once."""
        self._renew_at = 0.0
        Executor(connection, self._schema).execute(_RELEASE, self._parameters)
