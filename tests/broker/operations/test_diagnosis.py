"""The doctor's findings about the role: each right that the broker's work needs, and each kind of timeout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.leading import LeaderSettings
from outbox.broker.operations.conditions import Condition, Severity
from outbox.broker.operations.diagnosis import diagnose
from outbox.broker.postgres import PostgresBroker
from outbox.subscription import Subscription
from tests.broker.support import message, new_sequencer, process
from tests.support import eventually


@pytest.fixture
def limited(database: BrokerDatabase, connection: BrokerConnection) -> Iterator[BrokerDatabase]:
    """The broker as a role sees it that has the rights on tables, and no others: functions are closed to PUBLIC."""
    name = f"limited_{conninfo_to_dict(database.conninfo)['dbname']}"
    role = sql.Identifier(name)
    connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
    connection.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA outbox FROM PUBLIC")
    connection.execute(sql.SQL("GRANT USAGE ON SCHEMA outbox TO {}").format(role))
    connection.execute(
        sql.SQL("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA outbox TO {}").format(role)
    )
    connection.execute(sql.SQL("REVOKE ALL ON outbox.queue_head, outbox.message_v1 FROM {}").format(role))
    yield BrokerDatabase(make_conninfo(database.conninfo, user=name))
    connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
    connection.execute(sql.SQL("DROP ROLE {}").format(role))


def examined(database: BrokerDatabase) -> dict[str, Condition]:
    """The doctor's findings, by name."""
    with contextlib.closing(database.open()) as opened:
        return {one.name: one for one in diagnose(Executor(opened, database.schema), database)}


def test_rights_on_views_functions_and_sequences_are_looked_at(
    limited: BrokerDatabase, broker: PostgresBroker, connection: BrokerConnection
) -> None:
    broker.send([message()])
    with contextlib.closing(limited.open()) as opened:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            new_sequencer(limited).run_once(opened)
    found = examined(limited)["grants"]
    assert found.severity is Severity.CRITICAL
    for named in ("SELECT on queue_head", "SELECT on message_v1", "EXECUTE on make_tick", "EXECUTE on record_end"):
        assert named in found.meaning
    assert "SELECT on commit_log_log_id_seq" in found.meaning
    assert "EXECUTE on publish" not in found.meaning, "only for roles that publish from SQL"


def test_the_remedy_is_enough_for_a_whole_worker(
    limited: BrokerDatabase, connection: BrokerConnection, caplog: pytest.LogCaptureFixture
) -> None:
    """Execute the printed statements unchanged; afterwards it finds nothing, and no part of a worker is refused."""
    remedy = examined(limited)["grants"].next_step
    connection.execute(remedy.removeprefix("Execute as the owner of the tables: ").encode())
    assert examined(limited)["grants"].severity is Severity.OK
    handled: list[object] = []
    runtime = ConsumerRuntime(limited, [(Subscription(group="g", topic="orders"), lambda one: handled.append(one))])
    scanned, counted = "SELECT max(scan_id) FROM outbox.half_scan", "SELECT count(*) FROM outbox.summary"
    with (
        process(limited, LeaderSettings(maintenance_seconds=0.1, summary_seconds=0.1)),
        contextlib.closing(PostgresBroker(limited)) as broker,
    ):
        broker.send([message()])
        eventually(lambda: runtime.run_once().handled or handled)
        eventually(lambda: connection.execute(counted.encode()).fetchone() != (0,))
        eventually(lambda: connection.execute(scanned.encode()).fetchone() != (None,))
    assert "permission denied" not in caplog.text


def test_timeouts_of_sessions_that_idle_are_named(limited: BrokerDatabase, connection: BrokerConnection) -> None:
    role = sql.Identifier(str(conninfo_to_dict(limited.conninfo)["user"]))
    connection.execute(sql.SQL("ALTER ROLE {} SET idle_session_timeout = '1min'").format(role))
    assert "idle_session_timeout=1min" in examined(limited)["timeouts of roles"].meaning


def test_the_role_of_the_direct_connection_is_examined_too(
    limited: BrokerDatabase, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """Ticks run on the direct connection, whose role may be another one."""
    found = examined(BrokerDatabase(database.conninfo, listen_conninfo=limited.conninfo))
    assert found["grants"].severity is Severity.OK
    assert "EXECUTE on make_tick" in found["grants of LISTEN_URL"].meaning
    away = BrokerDatabase(database.conninfo, listen_conninfo="host=localhost port=1 dbname=nowhere")
    assert "cannot be reached" in examined(away)["grants of LISTEN_URL"].meaning
    other = BrokerDatabase(database.conninfo, listen_conninfo=make_conninfo(database.conninfo, dbname="postgres"))
    assert "the database 'postgres', which has no schema 'outbox'" in examined(other)["grants of LISTEN_URL"].meaning
