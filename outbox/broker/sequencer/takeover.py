"""Take over as the sequencer: start from the stored tick, after a check that its transaction ids are still valid."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from outbox import faults, heartbeat
from outbox.broker.database import timeouts
from outbox.broker.database.arrays import xids
from outbox.broker.database.connection import ReachedServer, reached_server
from outbox.broker.database.executor import Executor
from outbox.broker.database.snapshot import Snapshot
from outbox.broker.groups import lives
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident, IncidentKind
from outbox.broker.sequencer import takeover_sql, tick_sql
from outbox.broker.sequencer.key_order import KeyOrder
from outbox.broker.transaction import checks
from outbox.transaction import CheckSettings

logger = logging.getLogger(__name__)

# Comparing all decisions with all queues takes minutes at most. If another process took over meanwhile, because this
# one seems to hang, the comparison would never finish.
_RESYNC_SECONDS: Final = 3600.0


@dataclass
class TickState:
    """The sequencer's position: the last tick, and the order of FIFO keys.

    `life`: the life of the server in which all this was read. `half_snapshot`: the FIFO half rows that `order` knows;
    it can be ahead of the tick's `snapshot`. `fifo_topics`: the topics whose half rows `order` knows. `newest_parked`:
    the time of the last parking, by the last look at all transactions that block a key. `due_from`: no scheduled
    message is due earlier, except those stored late, for which the sequencer looks from time to time. `is_entangled`:
    the last look found FIFO messages that wait, or may be waited for; the next tick begins with a look. `meets_fifo`:
    the last messages were FIFO ones; if any are open or held, the next tick asks before it commits. `names_queues`: all
    entries of earlier ticks are announced, so the next notification names only the queues of its own tick.
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

    def must_look(self, now: float) -> bool:
        """Whether held messages may be free although the next tick meets no new message of their keys."""
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
    is_compared: bool
    has_foreign_ids: bool
    is_copy: bool


def _prepare(run: Executor, *, local: bool) -> None:
    """Apply the sequencer's settings: for the session, or for one transaction as its first statement."""
    if local:
        timeouts.lift_for_transaction(run.connection)
    else:
        timeouts.lift_for_session(run.connection)
    run.execute(tick_sql.SETTINGS, {"local": local}, prepare=True)


def adopt(run: Executor, check: CheckSettings, *, local: bool = False) -> TickState:
    """Read the sequencer's position; resynchronise first if transaction ids started over (restore, failover).

    `local`: the connection's session may not last (see `_prepare`).
    """
    if not local:
        _prepare(run, local=False)
    # First: positions remembered in another life of the server must be invalid before a tick is made.
    life = lives.current(run)
    if _broker(run).fifo_topics:
        # Then the following reads only the transactions that the scan found undecided, not the whole log.
        checks.scan(run, settings=check)
    _resync_if_needed(run, check, life, local=local)
    _begin(run, local=local)
    broker = _broker(run)
    state = _last_tick(run, broker, life)
    for log_id, topic_id, key in run.rows(takeover_sql.HELD):
        state.order.hold(log_id, (topic_id, key), time.monotonic())
    state.fifo_topics = broker.fifo_topics
    if broker.fifo_topics:
        for log_id, topic_id, key, transaction_id in run.rows(takeover_sql.OPEN_HALVES, _open_since(state, broker)):
            state.order.open(log_id, (topic_id, key), transaction_id)
    # A decision between the last tick and now may have freed a held message; the next tick finds out.
    state.order.reconsider()
    run.execute(tick_sql.COMMIT)
    logger.info("sequencing from tick %d, incarnation %d", state.tick_id, state.incarnation)
    return state


def _begin(run: Executor, *, local: bool) -> None:
    run.execute(tick_sql.BEGIN_REPEATABLE)
    if local:
        _prepare(run, local=True)


def _broker(run: Executor) -> _Broker:
    [broker] = run.objects(_Broker, takeover_sql.BROKER)
    return broker


def _last_tick(run: Executor, broker: _Broker, life: UUID) -> TickState:
    tick_id, snapshot = run.one(takeover_sql.LAST_TICK)
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
    # The tick first: another leader may tick meanwhile, and an earlier snapshot would look overtaken.
    state = _last_tick(run, _broker(run), life)
    broker = _broker(run)
    reached = reached_server(run.connection)
    reasons = []
    if reached.system_identifier != broker.system_identifier:
        reasons.append(f"the server is {reached.system_identifier}, it was {broker.system_identifier}")
    if reached.timeline != broker.timeline:
        reasons.append(f"the timeline is {reached.timeline}, it was {broker.timeline}")
    if state.snapshot.xmax > Snapshot.parse(broker.snapshot).xmax:
        reasons.append(f"the last tick has read up to transaction {state.snapshot.xmax}, which is in the future")
    if broker.has_foreign_ids:
        reasons.append("there are decisions with transaction ids of the future")
    if broker.is_copy:
        reasons.append("a restore or a copy has written the tables")
    if not broker.is_compared:
        reasons.append(f"version 0.1 began incarnation {broker.incarnation}")
    if reasons:
        heartbeat.busy(_RESYNC_SECONDS)
        _resync(run, check, reached, "; ".join(reasons), local=local)


def _resync(run: Executor, check: CheckSettings, reached: ReachedServer, reason: str, *, local: bool) -> None:
    """Compare all decisions with all queues once, and continue from the current snapshot in a new incarnation.

    It uses one transaction, which waits for no publisher. A transaction in progress now, prepared ones included, may
    commit later. It is not in this snapshot, and a later tick reads it, whatever incarnation it carries
    (docs/decisions/024).
    """
    _begin(run, local=local)
    [tick_id, _] = run.one(takeover_sql.LAST_TICK)
    # This reads everything; the sequencer's own settings would do it by index.
    run.connection.execute("SET LOCAL enable_seqscan = on")
    [incarnation] = run.one(
        takeover_sql.RAISE_INCARNATION,
        {"system_identifier": reached.system_identifier, "timeline": reached.timeline},
    )
    lost = run.count(takeover_sql.HOLD_LOST)
    foreign = run.count(takeover_sql.FREEZE_FOREIGN)
    run.execute(takeover_sql.RECORD_RESYNC, {"incarnation": incarnation, "reason": reason})
    run.execute(takeover_sql.RESET_HALF_SCAN, {"immunity": check.immunity_seconds})
    run.execute(takeover_sql.RESYNC_TICK, {"tick_id": tick_id, "incarnation": incarnation})
    detail = (
        f"{reason}: incarnation {incarnation} begins, {lost} decided messages were not in any queue, "
        f"{foreign} decisions had transaction ids of another server"
    )
    incidents.record(run, [Incident(IncidentKind.RESYNC, "broker", detail)])
    faults.point("sequencer.mid_resync")
    run.execute(tick_sql.COMMIT)
