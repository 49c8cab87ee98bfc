"""The limits on the number of sessions of a PostgreSQL server, and how many sessions are open now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement

# A role without pg_read_all_stats sees the sessions of other roles, but not their `backend_type`. The background
# processes of the server have no database. A limit of -1 is no limit, and limits of roles do not apply to superusers.
_LIMITS: Final = Statement("""
WITH open AS (
    SELECT usesysid, datid FROM pg_stat_activity
    WHERE datid IS NOT NULL AND coalesce(backend_type, 'client backend') = 'client backend'
)
SELECT (SELECT count(*) FROM open),
       CASE WHEN rolsuper THEN current_setting('max_connections')::integer
            ELSE current_setting('max_connections')::integer
                 - current_setting('superuser_reserved_connections')::integer
                 - coalesce(current_setting('reserved_connections', true), '0')::integer END,
       rolname::text, (SELECT count(*) FROM open WHERE usesysid = pg_roles.oid),
       CASE WHEN rolsuper THEN -1 ELSE rolconnlimit END,
       datname::text, (SELECT count(*) FROM open WHERE datid = pg_database.oid),
       CASE WHEN rolsuper THEN -1 ELSE datconnlimit END
FROM pg_roles, pg_database
WHERE rolname = session_user AND datname = current_database()
""")
_CONSUMERS: Final = Statement("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outbox-consumer'")
_PID: Final = Statement("SELECT pg_backend_pid()")


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on sessions: its name, how many sessions count now, and how many are allowed."""

    limit: str
    used: int
    allowed: int


def limits(run: Executor) -> list[Limit]:
    """Return the limits that apply to the role and the database of this connection, the tightest first."""
    used, allowed, role, of_role, role_limit, database, of_database, database_limit = run.one(_LIMITS)
    found = [
        Limit("max_connections without the reserved ones", used, allowed),
        Limit(f"CONNECTION LIMIT of the role {role}", of_role, role_limit),
        Limit(f"CONNECTION LIMIT of the database {database}", of_database, database_limit),
    ]
    return sorted((one for one in found if one.allowed >= 0), key=lambda one: one.allowed - one.used)


def consumer_processes(run: Executor) -> int:
    """Return how many consumer processes are connected to this server now."""
    return int(run.one(_CONSUMERS)[0])


def is_behind_pooler(run: Executor) -> bool:
    """Return whether a pooler is in between, which has limits of its own. It reports an invented process id."""
    return bool(run.one(_PID)[0] != run.connection.info.backend_pid)
