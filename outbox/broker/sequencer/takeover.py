"""Take over as the sequencer: check that transaction ids are still valid, then continue from the stored tick."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from outbox.broker.database import timeouts
from outbox.broker.database.arrays import xids
from outbox.broker.database.connection import ReachedServer, reached_server
from outbox.broker.database.executor import Executor, Snapshot
from outbox.broker.database.statement import Statement
from outbox.broker.groups import lives
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident, IncidentKind
from outbox.broker.sequencer.key_order import KeyOrder
from outbox.broker.transaction import checks
from outbox.broker.transaction.half_scan import insert_pending
from outbox.transaction import CheckSettings
from outbox.utils import faults, heartbeat

logger = logging.getLogger(__name__)

# The planning of a tick would take longer than its execution. So PostgreSQL plans the statements of a tick once, for
# any parameters. Sequential scans are off, and the statements read the log in subqueries with OFFSET 0, so PostgreSQL
# can only choose plans that read just the new rows. The plans stay good if a table grows after the planning and is
# never analysed (docs/decisions/130). If `local`, the settings apply to one transaction only, because a pooler would
# pass them on to other clients.
TICK_SETTINGS: Final = Statement("""
SELECT set_config('plan_cache_mode', 'force_generic_plan', %(local)s), set_config('enable_seqscan', 'off', %(local)s),
       set_config('jit', 'off', %(local)s), set_config('enable_mergejoin', 'off', %(local)s),
       set_config('default_transaction_isolation', 'read committed', %(local)s),
       set_config('idle_in_transaction_session_timeout', '5s', %(local)s)
""")

BEGIN_REPEATABLE: Final = Statement("BEGIN ISOLATION LEVEL REPEATABLE READ")
COMMIT: Final = Statement("COMMIT")

_LAST_TICK: Final = Statement("SELECT tick_id, snapshot::text FROM {schema}.tick ORDER BY tick_id DESC LIMIT 1")

# A visible row has a transaction id below the end of the snapshot, unless another server assigned the id.
_BROKER: Final = Statement("""
SELECT incarnation, system_identifier, timeline, pg_current_snapshot()::text AS snapshot,
       (SELECT snapshot::text FROM {schema}.half_scan ORDER BY scan_id DESC LIMIT 1) AS half_scan,
       ARRAY(SELECT topic_id FROM {schema}.topic WHERE 'FIFO' = ANY (message_types) ORDER BY topic_id) AS fifo_topics,
       EXISTS (SELECT FROM {schema}.op_log WHERE xid >= pg_snapshot_xmax(pg_current_snapshot())) AS has_foreign_ids,
       EXISTS (SELECT FROM {schema}.life WHERE is_copy
               AND ordinal > (SELECT max(life_ordinal) FROM {schema}.resync)) AS is_copy
FROM {schema}.broker
""")

_HELD: Final = Statement("SELECT log_id, topic_id, key FROM {schema}.held")

# A row is open if it is visible, on a FIFO topic, not delayed, and without a decision that the last tick has read.
# Candidates are the half rows that the half scan found undecided, the half rows that the half scan has not read, and
# all rows decided since the last tick.
_OPEN_HALVES: Final = Statement("""
WITH candidate AS (
    SELECT log.log_id, pending.parked_at
    FROM {schema}.pending_check pending
    JOIN {schema}.commit_log first ON first.log_id = pending.log_id
    JOIN {schema}.commit_log log ON log.half AND log.xid = first.xid AND log.transaction_id = pending.transaction_id
    UNION
    SELECT log_id, NULL FROM {schema}.commit_log
    WHERE half AND xid >= %(scan_xmax)s::xid8 AND xid < pg_snapshot_xmax(pg_current_snapshot())
    UNION
    SELECT log_id, NULL FROM {schema}.commit_log WHERE half AND xid = ANY (%(scan_xip)s::xid8[])
    UNION
    SELECT unnest(log_ids), NULL FROM {schema}.op_log WHERE xid >= %(xmax)s::xid8
    UNION
    SELECT unnest(log_ids), NULL FROM {schema}.op_log WHERE xid = ANY (%(xip)s::xid8[])
)
SELECT log.log_id, log.topic_id, log.key, log.transaction_id
FROM (SELECT log_id, max(parked_at) AS parked_at FROM candidate GROUP BY log_id) AS one
JOIN {schema}.commit_log log USING (log_id)
JOIN {schema}.topic USING (topic_id)
WHERE log.deliver_at IS NULL AND 'FIFO' = ANY (message_types)
  AND NOT (on_park = 'release' AND parked_at IS NOT NULL)
  AND NOT EXISTS (
      SELECT FROM {schema}.op_log op
      WHERE op.transaction_id = log.transaction_id AND pg_visible_in_snapshot(op.xid, %(snapshot)s::pg_snapshot))
""")

# -- after transaction ids started over -------------------------------------------------------------------------

_RAISE_INCARNATION: Final = Statement("""
UPDATE {schema}.broker SET incarnation = incarnation + 1, system_identifier = %(system_identifier)s,
    timeline = %(timeline)s
RETURNING incarnation
""")

# The statement compares log ids, because the transaction ids in the tables may be from another server. A committed
# message that is in no queue becomes held, and the next tick releases it.
_HOLD_LOST: Final = Statement("""
WITH lost AS (
    SELECT log.log_id, log.topic_id, log.key, log.deliver_at
    FROM (SELECT unnest(log_ids) AS log_id FROM {schema}.op_log WHERE decision = 'C') AS decided
    JOIN {schema}.commit_log log USING (log_id)
    WHERE NOT EXISTS (SELECT FROM {schema}.consume_queue entry WHERE entry.log_id = log.log_id)
      AND NOT EXISTS (SELECT FROM {schema}.scheduled WHERE scheduled.log_id = log.log_id)
      AND NOT EXISTS (SELECT FROM {schema}.held WHERE held.log_id = log.log_id)
      AND NOT EXISTS (SELECT FROM {schema}.recalled WHERE recalled.log_id = log.log_id)
), later AS (
    INSERT INTO {schema}.scheduled (log_id, due_at) SELECT log_id, deliver_at FROM lost WHERE deliver_at > now()
    ON CONFLICT DO NOTHING
)
INSERT INTO {schema}.held (log_id, topic_id, key)
SELECT log_id, topic_id, key FROM lost WHERE deliver_at IS NULL OR deliver_at <= now()
""")

# A decision in op_log may have a foreign id: a transaction id that another server assigned. The row of such a decision
# is visible, although the current snapshot does not contain the foreign id. This statement replaces each foreign id by
# 2, PostgreSQL's own "frozen" id. Otherwise a tick would read the decision again when this server reaches the foreign
# id. After a failover or a physical restore, the server continues the old sequence of transaction ids, so no row of
# op_log has a foreign id. After a logical restore, most rows of op_log have a foreign id.
_FREEZE_FOREIGN: Final = Statement("""
UPDATE {schema}.op_log SET xid = '2'
WHERE xid >= pg_snapshot_xmin(pg_current_snapshot()) AND NOT pg_visible_in_snapshot(xid, pg_current_snapshot())
""")

_RECORD_RESYNC: Final = Statement("""
INSERT INTO {schema}.resync (incarnation, reason, snapshot, life_ordinal)
VALUES (%(incarnation)s, %(reason)s, pg_current_snapshot(), (SELECT coalesce(max(ordinal), 0) FROM {schema}.life))
""")

# This statement adds a row to `pending_check` for every undecided transaction that has none. So the half scan can
# continue from the current snapshot.
_RESET_HALF_SCAN: Final = Statement(
    f"""
WITH moved AS ({insert_pending("{schema}.commit_log AS half_row", "half AND message_id = transaction_id")}
    ON CONFLICT (transaction_id) DO NOTHING
)
INSERT INTO {{schema}}.half_scan (scan_id, snapshot)
SELECT (SELECT max(scan_id) + 1 FROM {{schema}}.half_scan), pg_current_snapshot()
"""
)

_RESYNC_TICK: Final = Statement("""
INSERT INTO {schema}.tick (tick_id, snapshot, incarnation, appended, queue_ids, heads, is_full)
SELECT %(tick_id)s + 1, pg_current_snapshot(), %(incarnation)s, 0, coalesce(array_agg(queue_id), '{{}}'),
       coalesce(array_agg(head), '{{}}'), true
FROM {schema}.queue_head WHERE head > 0
""")


# The heartbeat file says for this number of seconds that the process is busy with the comparison of all decisions with
# all queues. The comparison takes some minutes at most. Without this entry in the file, a probe could judge that the
# process hangs. Each new process would then be restarted, too, and no process would ever finish the comparison.
_RESYNC_SECONDS: Final = 3600.0


@dataclass
class TickState:
    """The position of the sequencer: the last tick, and the order of FIFO keys.

    `life`: the life of the server in which this process read the position. `order` has the FIFO half messages that the
    snapshot `half_snapshot` contains. `half_snapshot` can be newer than `snapshot`, which is the snapshot of the tick.
    `fifo_topics`: the topics whose half messages are in `order`. `newest_parked`: the newest time of parking that this
    process has read. `look_at_all_parked_at`: the time at which the sequencer next reads all parked transactions.
    `due_from`: no scheduled message is due before this time, except messages that were stored late.
    `look_at_all_due_at`: the time of the next search for scheduled messages that were stored late. `is_entangled`: the
    last look found FIFO messages that wait, or that may make other messages wait, so the next tick begins with a look.
    `meets_fifo`: the next tick may read FIFO messages. If the next tick reads FIFO messages while any message is open
    or held, the statement of the tick returns before it changes anything, so that this process can check the order.
    `names_queues`: the consumers know all entries of earlier ticks, so the next notification names only the queues of
    its own tick. `is_heard`: when the last tick was made, another consumer process was alive.
    """

    tick_id: int
    snapshot: Snapshot
    half_snapshot: Snapshot
    incarnation: int
    life: UUID
    fifo_topics: list[int] = field(default_factory=list)
    order: KeyOrder = field(default_factory=KeyOrder)
    newest_parked: bytes | None = None
    look_at_all_parked_at: float = 0.0
    due_from: bytes = b"-infinity"
    look_at_all_due_at: float = 0.0
    is_entangled: bool = False
    meets_fifo: bool = False
    names_queues: bool = False
    is_heard: bool = True

    def must_look(self, now: float) -> bool:
        """Return whether a look may release held messages even if the next tick finds no new message of their keys."""
        order = self.order
        return order.has_releasable or (
            order.has_held and (order.has_new_blockers or now >= self.look_at_all_parked_at)
        )


@dataclass(frozen=True, slots=True)
class _Broker:
    incarnation: int
    system_identifier: str
    timeline: int
    snapshot: str
    half_scan: str
    fifo_topics: list[int]
    has_foreign_ids: bool
    is_copy: bool


def _prepare(run: Executor, *, local: bool) -> None:
    """Apply the sequencer's settings to the session or, if `local`, to the transaction that has just begun."""
    if local:
        run.execute(timeouts.LIFT, {"local": True})
    else:
        timeouts.lift_for_session(run.connection)
    run.execute(TICK_SETTINGS, {"local": local}, prepare=True)


def adopt(run: Executor, check: CheckSettings, *, now: float, local: bool = False) -> TickState:
    """Return the position of the sequencer. If transaction ids started over (restore, failover), resynchronise first.

    The keys of held messages wait from `now` on, which is a time on the clock of the sequencer. `local` is true if the
    next transaction may run in another session (see `_prepare`).
    """
    if not local:
        _prepare(run, local=False)
    # First record the new life of the server, so that positions which processes remember from an earlier life are
    # invalid before the first tick.
    life = lives.current(run)
    if _broker(run).fifo_topics:
        # After this scan, the statements below read only transactions that the scan found undecided, not the whole log.
        checks.scan(run, settings=check)
    _resync_if_needed(run, check, life, local=local)
    _begin(run, local=local)
    broker = _broker(run)
    state = _last_tick(run, broker, life)
    for log_id, topic_id, key in run.rows(_HELD):
        state.order.hold(log_id, (topic_id, key), now)
    state.fifo_topics = broker.fifo_topics
    if broker.fifo_topics:
        for log_id, topic_id, key, transaction_id in run.rows(_OPEN_HALVES, _open_since(state, broker)):
            state.order.open(log_id, (topic_id, key), transaction_id)
    # A decision since the last tick may have freed a held message, so the next tick checks all held messages.
    state.order.reconsider()
    run.execute(COMMIT)
    logger.info("sequencing from tick %d, incarnation %d", state.tick_id, state.incarnation)
    return state


def _begin(run: Executor, *, local: bool) -> None:
    run.execute(BEGIN_REPEATABLE)
    if local:
        _prepare(run, local=True)


def _broker(run: Executor) -> _Broker:
    [broker] = run.objects(_Broker, _BROKER)
    return broker


def _last_tick(run: Executor, broker: _Broker, life: UUID) -> TickState:
    tick_id, snapshot = run.one(_LAST_TICK)
    return TickState(
        tick_id=tick_id,
        snapshot=Snapshot.parse(snapshot),
        half_snapshot=Snapshot.parse(broker.snapshot),
        incarnation=broker.incarnation,
        life=life,
    )


def _open_since(state: TickState, broker: _Broker) -> dict[str, object]:
    scanned = Snapshot.parse(broker.half_scan)
    return {
        "scan_xmax": str(scanned.xmax),
        "scan_xip": xids(scanned.in_progress),
        "xmax": str(state.snapshot.xmax),
        "xip": xids(state.snapshot.in_progress),
        "snapshot": state.snapshot.text,
    }


def _resync_if_needed(run: Executor, check: CheckSettings, life: UUID, *, local: bool) -> None:
    # Read the tick before the snapshot. In the other order, another leader could make a tick between the two reads, and
    # that tick would seem to have transaction ids that this server has not reached.
    state = _last_tick(run, _broker(run), life)
    broker = _broker(run)
    reached = reached_server(run.connection)
    reasons = []
    if reached.system_identifier != broker.system_identifier:
        reasons.append(f"the server is {reached.system_identifier}, it was {broker.system_identifier}")
    if reached.timeline != broker.timeline:
        reasons.append(f"the timeline is {reached.timeline}, it was {broker.timeline}")
    if state.snapshot.xmax > Snapshot.parse(broker.snapshot).xmax:
        reasons.append(
            f"the last tick has read up to transaction id {state.snapshot.xmax}, which this server has not reached"
        )
    if broker.has_foreign_ids:
        reasons.append("there are decisions with transaction ids that this server has not reached")
    if broker.is_copy:
        reasons.append("a restore or a copy has written the tables")
    if reasons:
        heartbeat.busy(_RESYNC_SECONDS)
        _resync(run, check, reached, "; ".join(reasons), local=local)


def _resync(run: Executor, check: CheckSettings, reached: ReachedServer, reason: str, *, local: bool) -> None:
    """Compare all decisions with all queues once. Then continue from the current snapshot in a new incarnation.

    The comparison runs in one transaction, which does not wait for open transactions of publishers. A transaction that
    is now in progress or prepared may commit after the comparison. The current snapshot does not contain this
    transaction, so a later tick reads its decision, whatever the incarnation of the decision is. A lock on op_log
    instead would stop the broker until every open transaction has ended: one that stays prepared, for ever.

    A visible row whose xid the snapshot does not contain comes from another server (a logical restore), so its xid is
    set to 2. A dump must therefore be loaded before the workers start.
    """
    _begin(run, local=local)
    [tick_id, _] = run.one(_LAST_TICK)
    # The comparison reads whole tables, and with the sequencer's settings PostgreSQL would read these tables by index.
    run.connection.execute("SET LOCAL enable_seqscan = on")
    [incarnation] = run.one(
        _RAISE_INCARNATION,
        {"system_identifier": reached.system_identifier, "timeline": reached.timeline},
    )
    lost = run.count(_HOLD_LOST)
    foreign = run.count(_FREEZE_FOREIGN)
    run.execute(_RECORD_RESYNC, {"incarnation": incarnation, "reason": reason})
    run.execute(_RESET_HALF_SCAN, {"immunity": check.immunity_seconds})
    run.execute(_RESYNC_TICK, {"tick_id": tick_id, "incarnation": incarnation})
    detail = (
        f"{reason}: incarnation {incarnation} begins, {lost} decided messages were not in any queue, "
        f"{foreign} decisions had transaction ids of another server"
    )
    incidents.record(run, [Incident(IncidentKind.RESYNC, "broker", detail)])
    faults.point("sequencer.mid_resync")
    run.execute(COMMIT)
