"""Leader election for a role of the broker.

The leader lease only prevents double work. Two sequencers at the same time are safe, because only one of them can
commit the next tick. The lease expires by the clock of the database. The owner decides by its own monotonic clock when
to renew the lease, and counts from the moment before it sent the last renewal. A stand-in candidate leads only while no
other candidate wants to lead. Another candidate may take the lease of a stand-in at any time.
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

# A candidate that does not lead reads the lease with this statement before it tries to acquire the lease. So the
# candidate writes nothing while another candidate leads.
_REMAINING = Statement("""
SELECT CASE WHEN owner IS NULL OR owner = %(owner)s OR (stands_in AND NOT %(stands_in)s) THEN 0
            ELSE greatest(0, extract(epoch FROM expires_at - clock_timestamp())) END::double precision
FROM {schema}.leader_lease WHERE role = %(role)s
""")

# If a crash of the server loses a renewal of the lease, another candidate may become leader, which does no harm. So the
# commit of a renewal does not wait for the disk.
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


class LeaderLease:
    """The leader lease of one role, as one candidate uses it."""

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
        """Acquire or renew the lease, if it is time to do this.

        Return 0.0 if this candidate leads, else the seconds until the next attempt.
        """
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
        """Return whether a consumer process has taken the lease from this stand-in.

        A consumer process may take the lease of a stand-in at any time. Without this check, the ticks of the two
        processes would collide, and PostgreSQL would log an error each time a worker starts.
        """
        if not self._parameters["stands_in"]:
            return False
        others = Executor(connection, self._schema).row(_REMAINING, self._parameters, prepare=True)
        return others is not None and others[0] > 0

    def ask_again(self) -> None:
        """Make the next `hold` check the lease in the database, because another process seems to lead."""
        self._renew_at = 0.0

    def release(self, connection: Connection) -> None:
        """Release the leader lease, so that another candidate can lead at once."""
        self._renew_at = 0.0
        Executor(connection, self._schema).execute(_RELEASE, self._parameters)
