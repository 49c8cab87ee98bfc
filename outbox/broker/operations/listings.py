"""Lists page by page: open transactions and consumer processes."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from outbox.broker.database.arrays import xids
from outbox.broker.database.executor import Executor, Row, Snapshot
from outbox.broker.database.statement import Statement
from outbox.broker.groups.members import CallReport
from outbox.broker.groups.registration import unknown_group
from outbox.broker.operations.liveness import is_silent
from outbox.transaction import STILL_RUNNING

# A process that has died without leaving its groups is listed for an hour after the end of its membership.
_PROCESSES: Final = Statement(f"""
WITH listed AS MATERIALIZED (
    SELECT instance_id, min(host) AS host, min(pid) AS pid, min(joined_at) AS joined_at,
           max(expires_at) AS expires_at, array_agg(consumer_group.name ORDER BY consumer_group.name) AS groups
    FROM {{schema}}.consumer JOIN {{schema}}.consumer_group USING (group_id)
    WHERE expires_at > clock_timestamp() - interval '1 hour'
    GROUP BY instance_id
    HAVING %(group)s::text IS NULL OR bool_or(consumer_group.name = %(group)s)
), held AS MATERIALIZED (
    -- The groups of the listed processes: a group of its own page is found by the index.
    SELECT owner, count(*) AS queues FROM {{schema}}.queue_lease
    WHERE group_id IN (SELECT group_id FROM listed JOIN {{schema}}.consumer USING (instance_id))
      AND owner IN (SELECT instance_id FROM listed) AND queue_lease.expires_at > clock_timestamp()
    GROUP BY owner
)
SELECT instance_id, host, pid, groups, joined_at, expires_at, expires_at > clock_timestamp() AS is_alive,
       coalesce(held.queues, 0) AS queues, coalesce(known.version, '') AS version, known.seen_at,
       coalesce(known.calls, 0) AS calls, coalesce(known.longest, '[]') AS longest,
       CASE WHEN expires_at <= clock_timestamp() THEN 'vanished' WHEN known.draining THEN 'draining'
            ELSE 'alive' END AS state,
       EXISTS (SELECT FROM {{schema}}.outage WHERE outage.instance_id = listed.instance_id) AS is_outage,
       {is_silent("listed")} AS is_silent,
       EXISTS (SELECT FROM {{schema}}.leader_lease leader
               WHERE role = 'sequencer' AND leader.owner = instance_id
                 AND leader.expires_at > clock_timestamp()) AS leads
FROM listed LEFT JOIN held ON held.owner = instance_id LEFT JOIN {{schema}}.consumer_process known USING (instance_id)
ORDER BY expires_at > clock_timestamp() DESC, host, pid, instance_id LIMIT %(limit)s
""")


PROCESS_STATES: Final = ("alive", "draining", "vanished")

_GROUP: Final = Statement("SELECT name, paused, broadcast FROM {schema}.consumer_group WHERE name = %(group)s")


def group_now(run: Executor, group: str) -> Row:
    """Return the name of a group, whether it is `paused` now, and whether it is `broadcast`. Raises UnknownGroup."""
    found = run.objects(Row, _GROUP, {"group": group})
    if not found:
        raise unknown_group(group)
    return found[0]


def list_processes(run: Executor, group: str | None = None, *, limit: int = 100) -> list[Row]:
    """Return the consumer processes of a group or of all groups, processes that are alive first.

    `state`: one of PROCESS_STATES; a process is draining if it had begun to end at `seen_at`. `queues`: the number of
    its leases. `leads`: whether it is also the leader. `is_alive` is False if the membership of the process has ended
    without a renewal. `seen_at`: the time at which the process last renewed its membership. At this time, `calls`
    handler calls were running, and `running` has the longest of them, the longest first. Until its first report,
    `version` is '' and `seen_at` is None. `is_silent`: its last sign of life is older than one and a half of its
    intervals. `is_outage`: one of its subscriptions pauses, because its handlers fail.
    """
    found = run.objects(Row, _PROCESSES, {"group": group, "limit": limit})
    for one in found:
        one.running = [CallReport(**call) for call in one.longest]
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Open transactions in the broker: stored half messages without a decision, from any sender.
#
# Messages without a local transaction are not in these lists, because they are decided when they are stored. An open
# transaction blocks only its keys on FIFO topics.


def may_run(one: Row) -> str:
    """The reason why a local transaction may still run; empty if none is known or the transaction is parked."""
    if one.state == "parked":
        return ""
    if one.state == "new":
        return "the half scan has not found the transaction yet"
    if one.is_immune:
        return "the transaction is younger than its immunity"
    if (one.last_answer or "").startswith(STILL_RUNNING):
        return "the local transaction was still running at the last check"
    return ""


_LAST_SCAN: Final = Statement("SELECT snapshot::text FROM {schema}.half_scan ORDER BY scan_id DESC LIMIT 1")

# The rows that the half scan has not read yet.
_NEW: Final = """
    SELECT transaction_id, log_id, NULL::timestamptz AS parked_at, 0 AS checks, NULL::timestamptz AS due_at,
           NULL::text AS last_answer, true AS is_immune, true AS new
    FROM {schema}.commit_log new_half
    WHERE half AND message_id = transaction_id
      AND NOT EXISTS (SELECT FROM {schema}.pending_check known WHERE known.transaction_id = new_half.transaction_id)
      AND """

_OPEN: Final = Statement(f"""
WITH undecided AS (
    SELECT transaction_id, log_id, parked_at, checks, due_at, last_answer,
           clock_timestamp() < immune_until AS is_immune, false AS new
    FROM {{schema}}.pending_check
    UNION ALL {_NEW} xid >= %(xmax)s::xid8
    UNION ALL {_NEW} xid = ANY(%(xip)s::xid8[])
)
SELECT undecided.transaction_id, first.producer_group, noted.transactional_id, noted.epoch,
       coalesce(noted.epoch < newest.epoch, false) AS fenced, part.messages, part.topics,
       first.key, first.stored_at,
       CASE WHEN undecided.parked_at IS NOT NULL THEN 'parked' WHEN undecided.new THEN 'new'
            ELSE 'waiting' END AS state,
       undecided.checks, undecided.due_at, undecided.last_answer, undecided.is_immune
FROM undecided JOIN {{schema}}.commit_log first USING (log_id)
LEFT JOIN {{schema}}.fenced_half noted ON noted.transaction_id = undecided.transaction_id
LEFT JOIN {{schema}}.producer_epoch newest
    ON newest.producer_group = noted.producer_group AND newest.transactional_id = noted.transactional_id
CROSS JOIN LATERAL (
    SELECT count(*) AS messages, array_agg(DISTINCT topic.name ORDER BY topic.name) AS topics
    FROM {{schema}}.commit_log log JOIN {{schema}}.topic USING (topic_id)
    WHERE log.half AND log.xid = first.xid AND log.transaction_id = undecided.transaction_id
) AS part
WHERE undecided.transaction_id > %(after)s
  AND (%(id)s::uuid IS NULL OR undecided.transaction_id = %(id)s)
  AND (NOT %(parked)s OR undecided.parked_at IS NOT NULL)
  AND (%(group)s::text IS NULL OR first.producer_group = %(group)s)
  AND NOT EXISTS (SELECT FROM {{schema}}.op_log WHERE op_log.transaction_id = undecided.transaction_id)
ORDER BY undecided.transaction_id LIMIT %(limit)s
""")


def list_open(
    run: Executor,
    *,
    transaction_id: UUID | None = None,
    group: str | None = None,
    parked: bool = False,
    after: UUID | None = None,
    limit: int,
) -> list[Row]:
    """Return a page of open transactions, the oldest first: all of them, or those that the parameters select.

    `after`: the last transaction id of the page before.

    `state`: new (the half scan has not found the transaction yet), waiting (the broker asks the producer group at
    `due_at`) or parked. `is_immune`: the transaction is younger than its immunity. `transactional_id` and `epoch` are
    None if the producer has no transactional id. `fenced`: a newer instance with the same transactional id has replaced
    the producer. `messages` is their number, and `key` the key of the first one, empty if it has none.
    """
    last = Snapshot.parse(run.one(_LAST_SCAN)[0])
    values = {
        "xmax": str(last.xmax),
        "xip": xids(last.in_progress),
        "id": transaction_id,
        "group": group,
        "parked": parked,
        "after": after or UUID(int=0),
        "limit": limit,
    }
    # The statement is not prepared, because a plan without the snapshot's values would read the whole log.
    return run.objects(Row, _OPEN, values, prepare=False)


def open_transaction(run: Executor, transaction_id: UUID) -> Row | None:
    """Return one open transaction; None if it is decided or unknown."""
    return next(iter(list_open(run, transaction_id=transaction_id, limit=1)), None)
