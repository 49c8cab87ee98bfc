"""Call the tick, a function in the broker's database (outbox/broker/schema/0018_restores.sql)."""

from __future__ import annotations

from typing import Final

from outbox.broker.database.notify import Channel
from outbox.broker.database.statement import Statement

# Planning a tick would take longer than running it, so its statements are planned once, with bound values. Without
# sequential scans and with the log behind OFFSET 0, only the plans that read just the new rows are possible. This also
# holds on tables that have grown since and were never analysed (docs/decisions/130). `local`: for one transaction only,
# where a pooler would pass the settings on to other clients.
SETTINGS: Final = Statement("""
SELECT set_config('plan_cache_mode', 'force_generic_plan', %(local)s), set_config('enable_seqscan', 'off', %(local)s),
       set_config('jit', 'off', %(local)s), set_config('enable_mergejoin', 'off', %(local)s),
       set_config('default_transaction_isolation', 'read committed', %(local)s),
       set_config('idle_in_transaction_session_timeout', '5s', %(local)s)
""")

BEGIN_REPEATABLE: Final = Statement("BEGIN ISOLATION LEVEL REPEATABLE READ")
COMMIT: Final = Statement("COMMIT")
ROLLBACK: Final = Statement("ROLLBACK")

TICK: Final = Statement("""
SELECT obstacle, seen, stored, more, decision_count, appended_count, held_count, released_count, scheduled_count,
       due_count, next_due_seconds, nothing_due_before, met
FROM {schema}.tick_v18(
    own_life => %(life)s, last_tick => %(tick_id)s, own_incarnation => %(incarnation)s,
    seen_xmax => %(xmax)s, seen_xip => %(xip)s,
    half_xmax => %(half_xmax)s, half_xip => %(half_xip)s, known_fifo => %(fifo_topics)s, known_parked => %(parked)s,
    due_from => %(due_from)s, is_waiting => %(is_waiting)s, is_asking => %(is_asking)s,
    has_looked => %(has_looked)s, to_hold => %(hold)s, to_release => %(release)s,
    batch => %(batch)s, is_full_tick => %(is_full)s)
""")

# Executed after the tick's COMMIT, in a separate transaction that does not wait for the disk: a commit with a
# notification waits for all other commits with one. It announces entries that the tick has appended, if there are any.
# If the queues are few it names them, so that only the owners of these queues look. The row of a full tick has the
# heads of all queues.
ANNOUNCE: Final = Statement("""
SELECT set_config('synchronous_commit', 'off', true),
       pg_notify(%(channel)s, CASE WHEN %(names_queues)s::boolean AND NOT is_full AND cardinality(queue_ids) <= 50
                                   THEN array_to_string(queue_ids, ' ') ELSE '' END)
FROM {schema}.tick WHERE tick_id = %(tick_id)s::bigint + 1 AND appended > 0
""")


def queued_channel(schema: str) -> bytes:
    """Return the channel on which consumers listen."""
    return Channel.QUEUED.name_in(schema).encode()
