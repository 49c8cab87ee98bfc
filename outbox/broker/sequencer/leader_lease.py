"""Leader election for a role of the broker.

The leader lease only prevents double work. Two sequencers at the same time are safe, because only one of them can
commit the next tick. The lease expires by the clock of the database. The owner decides by its own monotonic clock when
to renew the lease, and counts from the moment before it sent the last renewal. A stand-in candidate leads only while no
other candidate wants to lead. Another candidate may take the lease of a stand-in at any time.

A candidate that lacks a part with work of the leader (`hooks.add_leader_work`) gives way to each candidate that lacks
none: services with different parts share a broker, and the work of a part is done while any process with it runs. Among
those that lack a part, a stand-in gives way as ever.
"""

from __future__ import annotations

import time
from typing import Final
from uuid import UUID

from outbox import hooks
from outbox.broker.database import arrays
from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

DEFAULT_TERM_SECONDS: Final = 3.0
SEQUENCER: Final = "sequencer"

# A candidate that does not lead reads the lease with this statement before it tries to acquire the lease. So the
# candidate writes nothing while another candidate leads.
_LACKS: Final = """
ARRAY(SELECT name FROM {schema}.schema_version WHERE leads AND name <> ALL (%(parts)s::text[]) ORDER BY name)
"""
_REMAINING = Statement(f"""
SELECT CASE WHEN owner IS NULL OR owner = %(owner)s
                 OR (cardinality(lacks) > 0, stands_in) > (cardinality({_LACKS}) > 0, %(stands_in)s) THEN 0
            ELSE greatest(0, extract(epoch FROM expires_at - clock_timestamp())) END::double precision
FROM {{schema}}.leader_lease WHERE role = %(role)s
""")

# If a crash of the server loses a renewal of the lease, another candidate may become leader, which does no harm. So the
# commit of a renewal does not wait for the disk.
_ACQUIRE = Statement(f"""
INSERT INTO {{schema}}.leader_lease AS held (role, owner, epoch, expires_at, stands_in, lacks)
SELECT %(role)s, %(owner)s, 1, clock_timestamp() + make_interval(secs => %(term)s),
       %(stands_in)s, candidate.lacks
FROM (SELECT set_config('synchronous_commit', 'off', true) AS synchronous_commit) AS relaxed,
     (SELECT {_LACKS} AS lacks) AS candidate
WHERE relaxed.synchronous_commit = 'off'
ON CONFLICT (role) DO UPDATE
SET owner = excluded.owner, expires_at = excluded.expires_at, stands_in = excluded.stands_in, lacks = excluded.lacks,
    epoch = held.epoch + (held.owner IS DISTINCT FROM excluded.owner)::integer
WHERE held.owner IS NULL OR held.owner = excluded.owner OR held.expires_at <= clock_timestamp()
   OR (cardinality(held.lacks) > 0, held.stands_in) > (cardinality(excluded.lacks) > 0, excluded.stands_in)
RETURNING stands_in OR cardinality(lacks) > 0
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
        self._parameters = {
            "role": role,
            "owner": owner,
            "term": term_seconds,
            "stands_in": stands_in,
            "parts": arrays.texts(list(hooks.leader_work)),
        }
        self._term = term_seconds
        self._renew_at = 0.0
        # Whether it gives way, as of the last renewal: a part may be installed while this candidate leads.
        self.stands_in = stands_in

    def acquire_or_renew(self, connection: Connection) -> float:
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
        acquired = run.row(_ACQUIRE, self._parameters, prepare=True)
        if acquired is None:
            return self._term
        [self.stands_in] = acquired
        self._renew_at = asked_at + self._term / 3
        return 0.0

    def _was_taken(self, connection: Connection) -> bool:
        """Return whether another candidate has taken the lease from this stand-in.

        It may take the lease of a stand-in at any time. Without this check, the ticks of the two
        processes would collide, and PostgreSQL would log an error each time a worker starts.
        """
        if not self.stands_in:
            return False
        others = Executor(connection, self._schema).row(_REMAINING, self._parameters, prepare=True)
        return others is not None and others[0] > 0

    def ask_again(self) -> None:
        """Make the next `acquire_or_renew` check the lease in the database, because another process seems to lead."""
        self._renew_at = 0.0

    def release(self, connection: Connection) -> None:
        """Release the leader lease, so that another candidate can lead at once."""
        self._renew_at = 0.0
        Executor(connection, self._schema).execute(_RELEASE, self._parameters)
