"""Timeouts that are set on roles or databases do not stop the broker's own work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.leading import LeaderSettings, LeadingConsumer
from outbox.broker.operations import audit, summary
from outbox.broker.postgres import PostgresBroker
from outbox.broker.schema.install import SCHEMA_VERSION, install
from outbox.broker.transaction import checks
from outbox.subscription import Subscription
from outbox.transaction import Answer, CheckSettings, Decision
from tests import pooler
from tests.broker.support import GROUP, half, message, new_sequencer, process, queued_ids
from tests.pooler import PROGRAM
from tests.support import eventually

# A busy machine may stall for a tenth of a second between a session's start and its first statement.
MILLISECONDS = 200
SETTINGS = (
    "statement_timeout",
    "lock_timeout",
    "transaction_timeout",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
)
# This trigger makes any statement on a table take longer than the timeouts.
SLOW = """
CREATE FUNCTION {schema}.slow() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_sleep(0.4); RETURN NULL; END $$;
"""


@pytest.fixture
def tiny(database: BrokerDatabase, connection: BrokerConnection) -> Iterator[BrokerDatabase]:
    """The broker as a role sees it whose timeouts are tiny."""
    name = f"tiny_{conninfo_to_dict(database.conninfo)['dbname']}"
    role = sql.Identifier(name)
    connection.execute(sql.SQL("CREATE ROLE {} LOGIN SUPERUSER").format(role))
    for setting in SETTINGS:
        if connection.execute("SELECT 1 FROM pg_settings WHERE name = %s", [setting]).fetchone():
            statement = sql.SQL("ALTER ROLE {} SET {} = {}")
            connection.execute(statement.format(role, sql.Identifier(setting), sql.Literal(f"{MILLISECONDS}ms")))
    yield BrokerDatabase(make_conninfo(database.conninfo, user=name))
    connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
    connection.execute(sql.SQL("DROP ROLE {}").format(role))


@pytest.fixture
def slow(connection: BrokerConnection) -> Callable[[str, str], None]:
    """A function that makes every statement of a kind on a table slow."""
    connection.execute(sql.SQL(SLOW).format(schema=sql.Identifier("outbox")))

    def make(kind: str, table: str) -> None:
        name = f"slow_{kind.lower()}"
        trigger = (
            f"CREATE TRIGGER {name} AFTER {kind} ON outbox.{table} FOR EACH STATEMENT EXECUTE FUNCTION outbox.slow()"
        )
        connection.execute(trigger.encode())

    return make


def test_the_timeouts_are_real(tiny: BrokerDatabase) -> None:
    with contextlib.closing(tiny.open()) as impatient, pytest.raises(psycopg.Error, match="timeout"):
        impatient.execute("SELECT pg_sleep(0.5)")


@pytest.mark.parametrize("listen", [None, ""])
def test_the_broker_process_sequences_and_cleans(
    listen: str | None,
    tiny: BrokerDatabase,
    slow: Callable[[str, str], None],
    broker: PostgresBroker,
    connection: BrokerConnection,
) -> None:
    """Also where LISTEN is off, and the settings may not outlast a transaction."""
    for kind, table in (("INSERT", "tick"), ("DELETE", "tick"), ("INSERT", "half_scan"), ("UPDATE", "broker")):
        slow(kind, table)
    # Its resynchronisation is slow as well.
    connection.execute("UPDATE outbox.broker SET timeline = timeline + 7")
    sent = broker.send([message()])
    broker.send_half(half())
    database = BrokerDatabase(tiny.conninfo, listen_conninfo=listen)
    with process(database, LeaderSettings(maintenance_seconds=0.1)):
        eventually(lambda: queued_ids(connection) == [sent[0].message_id])
        eventually(lambda: connection.execute("SELECT 1 FROM outbox.pending_check").fetchone(), what="the scan")
        old = "SELECT count(*) FROM outbox.tick WHERE tick_id < (SELECT max(tick_id) FROM outbox.tick WHERE is_full)"
        eventually(lambda: connection.execute(old.encode()).fetchone() == (0,), what="retention has trimmed the ticks")


@pytest.mark.parametrize(
    ("leads", "listen"),
    [
        pytest.param(False, None, id="broker leads", marks=pytest.mark.slow),
        pytest.param(True, "", id="consumer leads, without LISTEN"),
        pytest.param(True, None, id="consumer leads", marks=pytest.mark.slow),
        pytest.param(False, "", id="broker leads, without LISTEN", marks=pytest.mark.slow),
    ],
)
def test_a_whole_worker_keeps_its_sessions_and_leases(
    listen: str | None,
    leads: bool,
    tiny: BrokerDatabase,
    slow: Callable[[str, str], None],
    broker: PostgresBroker,
    connection: BrokerConnection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each heartbeat, renewal, offset and tick takes longer than the role's timeouts, and sessions idle for longer."""
    for kind, table in (
        ("INSERT", "consumer"),
        ("UPDATE", "queue_lease"),
        ("INSERT", "consumer_offset"),
        ("INSERT", "tick"),
    ):
        slow(kind, table)
    database = BrokerDatabase(tiny.conninfo, listen_conninfo=listen)
    handled: list[UUID] = []
    stop = threading.Event()
    runtime = ConsumerRuntime(
        database,
        [(Subscription(group="g", topic="orders"), lambda delivery: handled.append(delivery.message_id))],
        lease_seconds=3.0,
        session_task=LeadingConsumer(database) if leads else None,
    )
    consumer = threading.Thread(target=runtime.run, args=(stop,))
    renewed = "SELECT min(expires_at) FROM outbox.queue_lease HAVING count(owner) = count(*)"
    sessions = "SELECT pid, application_name FROM pg_stat_activity WHERE usename = %s AND application_name = ANY (%s)"
    long_lived = (tiny_role(tiny), ["outbox-coordinator", "outbox-consumer", "outbox-broker"])
    with process(database, LeaderSettings(stands_in=leads)):
        consumer.start()
        try:
            first = eventually(lambda: connection.execute(renewed).fetchone())
            eventually(lambda: len(connection.execute(sessions, long_lived).fetchall()) == 3)
            before = connection.execute(sessions, long_lived).fetchall()
            sent = broker.send([message()])
            eventually(lambda: handled == [sent[0].message_id], what="a message is handled")
            for _ in range(3):
                expires = first
                first = eventually(
                    lambda last=expires: (found := connection.execute(renewed).fetchone()) != last and found  # type: ignore[misc]
                )
            assert connection.execute("SELECT DISTINCT epoch FROM outbox.queue_lease").fetchall() == [(1,)]
            assert set(connection.execute(sessions, long_lived).fetchall()) == set(before), "no session was ended"
        finally:
            stop.set()
            consumer.join(30)
    complaints = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [one for one in complaints if "renewed" in one or "interrupted" in one] == []


def test_publishing_continues_after_its_idle_session_was_ended(
    tiny: BrokerDatabase, connection: BrokerConnection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    # On a busy machine, a tiny timeout ends a session between its start and its first statement.
    role = sql.Identifier(tiny_role(tiny))
    connection.execute(sql.SQL("ALTER ROLE {} SET idle_session_timeout = '1s'").format(role))
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE usename = %s"
    with contextlib.closing(PostgresBroker(tiny)) as broker:
        for _ in range(3):
            broker.send([message()])
            # The session of sends and that of wake-ups.
            eventually(lambda: connection.execute(sessions, [tiny_role(tiny)]).fetchone() == (0,))
    assert "trying again" not in caplog.text
    assert connection.execute("SELECT count(*) FROM outbox.commit_log").fetchone() == (3,)


def tiny_role(tiny: BrokerDatabase) -> str:
    return str(conninfo_to_dict(tiny.conninfo)["user"])


def test_settings_do_not_outlast_a_transaction_behind_a_pooler(
    tiny: BrokerDatabase, broker: PostgresBroker, connection: BrokerConnection
) -> None:
    """A pooler in transaction mode gives the same session to others next."""
    pooled = BrokerDatabase(tiny.conninfo, listen_conninfo="")
    broker.send([message()])
    shown = "SELECT name, setting FROM pg_settings WHERE source = 'session' AND name <> 'application_name'"
    with contextlib.closing(pooled.open(direct=True)) as session:
        before = session.execute(shown).fetchall()
        connection.execute("UPDATE outbox.broker SET timeline = timeline + 7")
        sequencer = new_sequencer(pooled)
        while sequencer.run_once(session).more:
            pass
        checks.scan(Executor(session, "outbox"), settings=CheckSettings())
        assert session.execute(shown).fetchall() == before
    assert len(queued_ids(connection)) == 1


@pytest.mark.skipif(PROGRAM is None, reason="PgBouncer is not installed")
def test_the_summary_is_stored_behind_a_pooler(
    tiny: BrokerDatabase,
    slow: Callable[[str, str], None],
    server_url: str,
    tmp_path: Path,
    connection: BrokerConnection,
) -> None:
    """Without it, lag and conditions would stay as they were before the pooler."""
    slow("INSERT", "summary")
    role = tiny_role(tiny)
    with pooler.running(server_url, tmp_path, size=2, logins=[role]) as running:
        name = conninfo_to_dict(tiny.conninfo)["dbname"]
        summary.run_once(BrokerDatabase(make_conninfo(running.url, user=role, dbname=name)))
    assert connection.execute("SELECT count(*) FROM outbox.summary").fetchone() == (1,)


def test_the_audit_ends_however_long_it_takes(tiny: BrokerDatabase, connection: BrokerConnection) -> None:
    waits = """
        SELECT 1 FROM pg_stat_activity
        WHERE usename = %s AND wait_event_type = 'Lock' AND query_start < clock_timestamp() - interval '0.5 s'
    """
    with (
        ThreadPoolExecutor(1) as pool,
        contextlib.closing(tiny.open()) as own,
        psycopg.connect(connection.info.dsn) as other,
    ):
        other.execute("LOCK TABLE outbox.commit_log")
        result = pool.submit(audit.run_once, Executor(own, "outbox"))
        eventually(lambda: result.done() or connection.execute(waits, [tiny_role(tiny)]).fetchone())
        other.rollback()
        assert result.result().differences == []


def test_check_back(tiny: BrokerDatabase, slow: Callable[[str, str], None], connection: BrokerConnection) -> None:
    impatient = PostgresBroker(tiny, check=CheckSettings(immunity_seconds=0))
    one = half(immunity_seconds=0)
    impatient.send_half(one)
    for kind, table in (("INSERT", "half_scan"), ("UPDATE", "pending_check"), ("INSERT", "check_history")):
        slow(kind, table)
    (check,) = impatient.claim_checks(GROUP)
    assert check.transaction_id == one.transaction_id
    impatient.report_answers(GROUP, [Answer(transaction_id=check.transaction_id, decision=Decision.COMMIT)])
    assert connection.execute("SELECT decision::text FROM outbox.op_log").fetchall() == [("C",)]
    impatient.close()


def test_install_waits_for_another_install(tiny: BrokerDatabase, connection: BrokerConnection) -> None:
    """The lock of the installation is waited for without a limit, with any timeouts of the role."""
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with psycopg.connect(make_conninfo(tiny.conninfo, user="postgres")) as holder:
            holder.execute("SELECT pg_advisory_xact_lock(hashtextextended('outbox.install', 0))")
            locked.set()
            waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            eventually(lambda: connection.execute(waiting.encode()).fetchone() != (0,))
            # Longer than the timeouts, so that they would have ended it.
            done.wait(4 * MILLISECONDS / 1000)

    thread = threading.Thread(target=hold)
    thread.start()
    assert locked.wait(20)
    with contextlib.closing(tiny.open()) as impatient:
        assert install(impatient, "second") == SCHEMA_VERSION
    thread.join()
