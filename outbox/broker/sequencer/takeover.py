"""Taking over as the sequencer: from the stored tick, after checking that its transaction ids still mean anything."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from outbox import faults
from outbox.broker.database import timeouts
from outbox.broker.database.arrays import bigints, cursor_on, integers, xids
from outbox.broker.database.connection import Connection, identity
from outbox.broker.database.snapshot import Snapshot
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident, IncidentKind
from outbox.broker.sequencer import statements
from outbox.broker.sequencer.key_order import KeyOrder
from outbox.broker.transaction import checks
from outbox.transaction import CheckSettings

logger = logging.getLogger(__name__)


@dataclass
class Position:
    """Where the sequencer stands: the last tick, the heads of all queues, and the order of FIFO keys.

    `half_snapshot` says which FIFO half rows `order` knows; it can be ahead of the tick's `snapshot`.
    `heads[queue_id]` is the next offset of a queue.
    """

    tick_id: int
    snapshot: Snapshot
    half_snapshot: Snapshot
    incarnation: int
    heads: list[int] = field(default_factory=lambda: [0])
    order: KeyOrder = field(default_factory=KeyOrder)

    def set_heads(self, queue_ids: Sequence[int], heads: Sequence[int]) -> None:
        """Take over the heads that a tick has written."""
        for queue_id, head in zip(queue_ids, heads, strict=True):
            if queue_id >= len(self.heads):
                self.heads.extend([0] * (queue_id + 1 - len(self.heads)))
            self.heads[queue_id] = head


@dataclass(frozen=True, slots=True)
class _Broker:
    incarnation: int
    system_identifier: str
    timeline: int
    snapshot: str
    half_scan: str
    has_fifo: bool
    is_compared: bool
    has_foreign_ids: bool


def prepare(connection: Connection, *, local: bool) -> None:
    """Settings of the sequencer's statements: for the session, or for one transaction as its first statement."""
    if local:
        timeouts.lift_for_transaction(connection)
    else:
        timeouts.lift_for_session(connection)
    with cursor_on(connection) as cursor:
        cursor.execute(statements.SETTINGS.on("outbox"), {"local": local}, prepare=True)


def adopt(connection: Connection, schema: str, check: CheckSettings, *, local: bool = False) -> Position:
    """Read the position; resynchronise first when transaction ids started over (restore, upgrade, failover).

    `local`: the connection's session may not last (see `prepare`).
    """
    if not local:
        prepare(connection, local=False)
    broker = _broker(connection, schema)
    if broker.has_fifo:
        # Then only what the scan has found undecided must be read below, not the whole log.
        checks.scan(connection, schema, settings=check)
    _resync_if_needed(connection, schema, check, local=local)
    connection.execute(statements.BEGIN_REPEATABLE)
    if local:
        prepare(connection, local=True)
    broker = _broker(connection, schema)
    position = _last_tick(connection, schema, broker)
    with cursor_on(connection) as cursor:
        for log_id, topic_id, key in cursor.execute(statements.HELD.on(schema)):
            position.order.hold(log_id, (topic_id, key), time.monotonic())
        if broker.has_fifo:
            cursor.execute(statements.OPEN_HALVES.on(schema), _open_since(position, broker))
            for log_id, topic_id, key, transaction_id in cursor:
                position.order.open(log_id, (topic_id, key), transaction_id)
    position.order.reconsider()
    connection.execute(statements.COMMIT)
    logger.info("sequencing from tick %d, incarnation %d", position.tick_id, position.incarnation)
    return position


def _broker(connection: Connection, schema: str) -> _Broker:
    with cursor_on(connection) as cursor:
        row = cursor.execute(statements.BROKER.on(schema)).fetchone()
    assert row is not None
    return _Broker(*row)


def _last_tick(connection: Connection, schema: str, broker: _Broker) -> Position:
    snapshot = Snapshot.parse(broker.snapshot)
    position = Position(tick_id=0, snapshot=snapshot, half_snapshot=snapshot, incarnation=broker.incarnation)
    with cursor_on(connection) as cursor:
        for tick_id, text, queue_ids, heads in cursor.execute(statements.TICKS.on(schema)):
            position.tick_id = tick_id
            position.snapshot = Snapshot.parse(text)
            position.set_heads(queue_ids, heads)
    return position


def _open_since(position: Position, broker: _Broker) -> dict[str, object]:
    scanned = Snapshot.parse(broker.half_scan)
    return {
        "scan_xmax": str(scanned.xmax),
        "scan_xip": xids(scanned.in_progress),
        "xmax": str(position.snapshot.xmax),
        "xip": xids(position.snapshot.in_progress),
        "snapshot": position.snapshot.text,
    }


def _resync_if_needed(connection: Connection, schema: str, check: CheckSettings, *, local: bool) -> None:
    # The tick first: another leader may tick meanwhile, and a snapshot taken before it would look overtaken.
    position = _last_tick(connection, schema, _broker(connection, schema))
    broker = _broker(connection, schema)
    reached = identity(connection)
    reasons = []
    if reached.system_identifier != broker.system_identifier:
        reasons.append(f"the server is {reached.system_identifier}, it was {broker.system_identifier}")
    if reached.timeline != broker.timeline:
        reasons.append(f"the timeline is {reached.timeline}, it was {broker.timeline}")
    if position.snapshot.xmax > Snapshot.parse(broker.snapshot).xmax:
        reasons.append(f"the last tick has read up to transaction {position.snapshot.xmax}, which is in the future")
    if broker.has_foreign_ids:
        reasons.append("there are decisions with transaction ids of the future")
    if not broker.is_compared:
        reasons.append(f"version 0.1 began incarnation {broker.incarnation}")
    if reasons:
        _resync(connection, schema, check, "; ".join(reasons), local=local)


def _resync(connection: Connection, schema: str, check: CheckSettings, reason: str, *, local: bool) -> None:
    """Compare all decisions with all queues once, and go on from the current snapshot in a new incarnation.

    One transaction, which waits for no publisher: what a transaction in progress now, prepared ones included, commits
    later is not in this snapshot and is read by a later tick, whatever incarnation it carries (docs/decisions/024).
    """
    reached = identity(connection)
    connection.execute(statements.BEGIN_REPEATABLE)
    if local:
        prepare(connection, local=True)
    position = _last_tick(connection, schema, _broker(connection, schema))
    with cursor_on(connection) as cursor:
        cursor.execute("SET LOCAL enable_seqscan = on")
        identified = {"system_identifier": reached.system_identifier, "timeline": reached.timeline}
        row = cursor.execute(statements.RAISE_INCARNATION.on(schema), identified).fetchone()
        assert row is not None
        lost = cursor.execute(statements.HOLD_LOST.on(schema)).rowcount
        foreign = cursor.execute(statements.FREEZE_FOREIGN.on(schema)).rowcount
        cursor.execute(statements.RECORD_RESYNC.on(schema), {"incarnation": row[0], "reason": reason})
        cursor.execute(statements.RESET_HALF_SCAN.on(schema), {"immunity": check.immunity_seconds})
        queue_ids = [queue_id for queue_id, head in enumerate(position.heads) if head]
        cursor.execute(
            statements.RESYNC_TICK.on(schema),
            {
                "tick_id": position.tick_id,
                "incarnation": row[0],
                "queue_ids": integers(queue_ids),
                "heads": bigints([position.heads[queue_id] for queue_id in queue_ids]),
            },
        )
    detail = (
        f"{reason}: incarnation {row[0]} begins, {lost} decided messages were not in any queue, "
        f"{foreign} decisions had transaction ids of another server"
    )
    incidents.record(connection, schema, [Incident(IncidentKind.RESYNC, "broker", detail)])
    faults.point("sequencer.mid_resync")
    connection.execute(statements.COMMIT)
