"""A resynchronisation waits for no transaction and loses none, whenever it began and however late it commits."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log import commit_log
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.operations.audit import count_messages
from outbox.broker.operations.rules import survey
from outbox.broker.postgres import PostgresBroker
from outbox.message import Message
from tests.broker.sequencer.writers import Pass, judge
from tests.broker.support import assert_gapless, drain, end, half, message, new_sequencer, queued_ids

# As after a failover: the next sequencer that takes over resynchronises.
FAILOVER = "UPDATE outbox.broker SET timeline = timeline + 7"


@dataclass(frozen=True)
class Late:
    """A transaction that begins before a resynchronisation and commits after it."""

    isolation: str
    publishes_before: bool
    prepares: bool = False
    savepoint: bool = False


LATE = {
    "repeatable read, publishes before": Late("REPEATABLE READ", publishes_before=True),
    "repeatable read, publishes after": Late("REPEATABLE READ", publishes_before=False),
    "serializable, publishes after": Late("SERIALIZABLE", publishes_before=False),
    "read committed, publishes before": Late("READ COMMITTED", publishes_before=True),
    "read committed, in a savepoint": Late("READ COMMITTED", publishes_before=True, savepoint=True),
    "read committed, publishes after": Late("READ COMMITTED", publishes_before=False),
    "prepared before": Late("READ COMMITTED", publishes_before=True, prepares=True),
    "repeatable read, published and prepared after": Late("REPEATABLE READ", publishes_before=False, prepares=True),
}


def _publish(connection: psycopg.Connection[TupleRow], one: Message, *, savepoint: bool) -> None:
    if savepoint:
        connection.execute("SAVEPOINT inner_block")
    commit_log.append_decided(Executor(connection, "outbox"), TopicCatalog(), [one])
    if savepoint:
        connection.execute("RELEASE inner_block")


@contextlib.contextmanager
def _open(database: BrokerDatabase, late: Late, *messages: Message) -> Iterator[Callable[[], None]]:
    """The transaction until the resynchronisation; call the yielded function to continue to its COMMIT."""
    gid = f"late-{messages[0].message_id}"
    with contextlib.closing(database.open(name="batch-job")) as connection:
        connection.execute(f"BEGIN ISOLATION LEVEL {late.isolation}".encode())
        connection.execute("SELECT incarnation FROM outbox.broker")
        if late.publishes_before:
            for one in messages:
                _publish(connection, one, savepoint=late.savepoint)
            if late.prepares:
                connection.execute(f"PREPARE TRANSACTION '{gid}'".encode())

        def finish() -> None:
            if not late.publishes_before:
                for one in messages:
                    _publish(connection, one, savepoint=late.savepoint)
                if late.prepares:
                    connection.execute(f"PREPARE TRANSACTION '{gid}'".encode())
            connection.execute(f"COMMIT PREPARED '{gid}'".encode() if late.prepares else b"COMMIT")

        try:
            yield finish
        finally:
            if connection.execute("SELECT 1 FROM pg_prepared_xacts WHERE gid = %s", [gid]).fetchone():
                connection.execute(f"ROLLBACK PREPARED '{gid}'".encode())


def _incarnation(connection: BrokerConnection) -> int:
    row = connection.execute("SELECT incarnation FROM outbox.broker").fetchone()
    assert row is not None
    return int(row[0])


TOPICS = ("orders", "ordered")


@pytest.mark.parametrize("kind", LATE)
def test_what_commits_after_a_resynchronisation_is_delivered_once(
    kind: str, broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    late, others = [[message(topic, key=key) for topic in TOPICS] for key in ("k", "other")]
    broker.send(others)
    drain(new_sequencer(database), connection)
    with _open(database, LATE[kind], *late) as finish:
        connection.execute(FAILOVER.encode())
        # The resynchronisation waits for no transaction: it ends at once, and other messages are sequenced.
        connection.execute("SET lock_timeout = '1ms'")
        sequencer = new_sequencer(database)
        for _ in range(3):
            more = [message(topic, key="other") for topic in TOPICS]
            broker.send(more)
            drain(sequencer, connection)
            assert {one.message_id for one in more} <= set(queued_ids(connection))
            others += more
        assert _incarnation(connection) == 2
        finish()
    more = [message(topic, key="k") for topic in TOPICS]
    broker.send(more)
    others += more
    drain(sequencer, connection)
    drain(new_sequencer(database), connection)
    assert sorted(queued_ids(connection)) == sorted(one.message_id for one in [*others, *late])
    assert _incarnation(connection) == 2, "once"
    assert_gapless(connection)
    assert count_messages(Executor(connection, "outbox")).differences() == []


def test_a_transaction_whose_begin_is_hidden_is_named_if_it_is_open_since_before(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """The status runs under a role without pg_read_all_stats."""
    role = sql.Identifier(f"watch_{uuid4().hex[:12]}")
    connection.execute(sql.SQL("CREATE ROLE {}").format(role))
    connection.execute(sql.SQL("GRANT USAGE ON SCHEMA outbox TO {}").format(role))
    connection.execute(sql.SQL("GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO {}").format(role))

    def sessions() -> list[str]:
        connection.execute(sql.SQL("SET ROLE {}").format(role))
        try:
            conditions = survey(Executor(connection, "outbox")).verdict.conditions
        finally:
            connection.execute("RESET ROLE")
        return [str(fact["session"]) for one in conditions if one.name == "transaction_open" for fact in one.evidence]

    try:
        with _open(database, LATE["read committed, publishes before"], message()) as finish:
            assert sessions() == []
            connection.execute(FAILOVER.encode())
            drain(new_sequencer(database), connection)
            with _open(database, LATE["read committed, publishes before"], message()):
                [found] = sessions()
            row = connection.execute(
                "SELECT 'session ' || min(pid) FROM pg_stat_activity WHERE application_name = 'batch-job'"
                " AND datname = current_database() AND xact_start < (SELECT max(at) FROM outbox.resync)"
            ).fetchone()
            assert row == (found,)
            finish()
        assert sessions() == []
    finally:
        connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
        connection.execute(sql.SQL("DROP ROLE {}").format(role))


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_two_leaders_resynchronise_again_and_again_among_writers(database: BrokerDatabase, isolation: str) -> None:
    """Writers with savepoints, aborts and a transaction that is open all the while; leaders that take over often."""
    options = f"-c default_transaction_isolation={isolation.replace(' ', chr(92) + ' ')}"
    writing = BrokerDatabase(make_conninfo(database.conninfo, options=options))
    verdict = judge(writing, [_resyncing(database, seed) for seed in (1, 2)], writers=4)
    assert verdict.is_clean, verdict
    with contextlib.closing(database.open()) as connection:
        assert _incarnation(connection) > 1


def _resyncing(database: BrokerDatabase, seed: int) -> Pass:
    rng = random.Random(seed)
    sequencer = None

    def run_once(connection: psycopg.Connection[TupleRow]) -> bool:
        nonlocal sequencer
        if sequencer is None or rng.random() < 0.2:
            connection.execute(f"BEGIN ISOLATION LEVEL READ COMMITTED; {FAILOVER}; COMMIT".encode())
            sequencer = new_sequencer(database)
        counts = sequencer.run_once(connection)
        return bool(counts.appended or counts.more)

    return run_once


_SEQUENCE = """
import sys, uuid
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.leading import Sequencer
database = BrokerDatabase(sys.argv[1])
with database.connect() as connection:
    sequencer = Sequencer(database, uuid.uuid4())
    while sequencer.run_once(connection).more:
        pass
"""


def test_a_sequencer_killed_in_the_middle_of_a_resynchronisation(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """It is one transaction: nothing has happened, and the next one does it."""
    late, others = message(), [message() for _ in range(3)]
    broker.send(others)
    with _open(database, LATE["repeatable read, publishes after"], late) as finish:
        connection.execute(FAILOVER.encode())
        for visit in range(2):
            killed = subprocess.run(
                [sys.executable, "-c", _SEQUENCE, database.conninfo],
                env={**os.environ, "OUTBOX_FAULTS": "sequencer.mid_resync=kill"},
                check=False,
            )
            assert killed.returncode == -signal.SIGKILL
            assert (_incarnation(connection), queued_ids(connection)) == (1, []), f"kill {visit}"
        drain(new_sequencer(database), connection)
        finish()
    drain(new_sequencer(database), connection)
    assert sorted(queued_ids(connection)) == sorted(one.message_id for one in [*others, late])
    assert _incarnation(connection) == 2
    assert_gapless(connection)


def _xid(connection: BrokerConnection) -> int:
    row = connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
    assert row is not None
    return int(row[0])


def test_ids_of_another_server_are_passed_without_reading_them_again(
    broker: PostgresBroker, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    """A dump restored into a younger server: rows carry ids that this server's own will reach soon."""
    restored = [message() for _ in range(3)]
    broker.send(restored)
    halves = [half(message("ordered", key="k")) for _ in range(3)]
    for waiting in halves:
        broker.send_half(waiting)
    broker.end([end(halves[0].transaction_id), end(halves[1].transaction_id)])
    drain(new_sequencer(database), connection)
    here = _xid(connection)
    connection.execute("UPDATE outbox.op_log SET xid = (%s + 10)::text::xid8", [here])
    connection.execute("UPDATE outbox.commit_log SET xid = (%s + 9)::text::xid8 WHERE half", [here])
    sequencer = new_sequencer(database)
    drain(sequencer, connection)
    sent = [message() for _ in range(20)]
    for one in sent:
        broker.send([one])
        drain(sequencer, connection)
    broker.end([end(halves[2].transaction_id)])
    last = message("ordered", key="k")
    broker.send([last])
    drain(sequencer, connection)
    drain(new_sequencer(database), connection)
    expected = [*restored, *sent, last, *(half_message for each in halves for half_message in each.messages)]
    assert sorted(queued_ids(connection)) == sorted(one.message_id for one in expected)
    assert queued_ids(connection, "ordered")[-1] == last.message_id
    rows = connection.execute("SELECT count(*) FROM outbox.resync").fetchone()
    assert rows == (2,), "installed, and once resynchronised"
