"""Times that were written while the server's clock was ahead."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log import incidents
from outbox.broker.maintenance import service
from outbox.broker.postgres import PostgresBroker
from outbox.broker.transaction import checks
from outbox.transaction import CheckSettings
from tests.broker.support import drain, half, let_time_pass, message, new_sequencer

YEARS = 74 * 365 * 86_400.0


def test_undecided_transactions_and_retries_count_from_now(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """Otherwise nothing would check or deliver them in our lifetime, and no page would say why."""
    ahead, later = half(immunity_seconds=60), message(deliver_at=datetime.now(UTC) + timedelta(days=70 * 365))
    broker.send([later, message()])
    drain(new_sequencer(database), connection)
    broker.send_half(ahead)
    checks.scan(Executor(connection, "outbox"), settings=CheckSettings())
    connection.execute(
        "UPDATE outbox.pending_check SET stored_at = stored_at + %(t)s, immune_until = immune_until + %(t)s,"
        " due_at = due_at + %(t)s",
        {"t": timedelta(seconds=YEARS)},
    )
    connection.execute(
        "INSERT INTO outbox.scheduled (log_id, due_at, queue_id, attempt)"
        " SELECT log_id, now() + %s, (SELECT min(queue_id) FROM outbox.queue), 1 FROM outbox.commit_log"
        " WHERE NOT half AND deliver_at IS NULL",
        [timedelta(seconds=YEARS)],
    )
    settled = half(immunity_seconds=60)
    broker.send_half(settled)
    for _ in range(2):
        service.run_once(database, CheckSettings())
    found = [one for one in incidents.recent(Executor(connection, "outbox")) if one.kind == "clock"]
    assert [one.subject for one in found] == ["retries", "undecided transactions"]
    assert all(one.detail.startswith("1 rows had times in the future, up to ") for one in found)
    due = "SELECT queue_id IS NOT NULL FROM outbox.scheduled WHERE due_at <= now()"
    assert connection.execute(due.encode()).fetchall() == [(True,)], "a message may be delayed for as long as it likes"
    assert broker.claim_checks("shop") == [], "the immunity begins anew"
    let_time_pass(connection, 61)
    claimed = broker.claim_checks("shop")
    assert {one.transaction_id for one in claimed} == {ahead.transaction_id, settled.transaction_id}
    assert all(one.may_write for one in claimed)
