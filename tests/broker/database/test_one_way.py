"""Requests without waiting: the last one arrives like the first, and no fault makes a sender wait or fail."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, cast
from uuid import UUID

import pytest
from psycopg import sql

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Announcements, Channel, announcement, listen
from outbox.broker.database.one_way import MAX_QUEUED, OneWay
from outbox.broker.database.statement import Request
from outbox.broker.postgres import PostgresBroker
from outbox.transaction import Decision
from outbox.utils.ids import uuid7
from tests.broker.support import end, half, message
from tests.support import eventually

WAKE = announcement("outbox", Channel.DECIDED)


def halves(broker: PostgresBroker, number: int) -> list[UUID]:
    stored = [half(message()) for _ in range(number)]
    for one in stored:
        broker.send_half(one)
    return [one.transaction_id for one in stored]


def decided(connection: BrokerConnection) -> dict[UUID, str]:
    return dict(connection.execute("SELECT transaction_id, decision::text FROM outbox.op_log").fetchall())


def session(connection: BrokerConnection) -> list[int]:
    rows = connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'outbox-one-way' AND datname = current_database()"
    )
    return [row[0] for row in rows]


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_ends_and_the_wake_up_arrive_without_a_further_call(
    broker: PostgresBroker, connection: BrokerConnection, database: BrokerDatabase
) -> None:
    with contextlib.closing(database.open(name="listening")) as listening:
        listen(Executor(listening, "outbox"), Channel.DECIDED)
        announcements = Announcements(listening)
        committed, rolled_back = halves(broker, 2)
        broker.end_one_way(end(committed))
        broker.end_one_way(end(rolled_back, Decision.ROLLBACK))
        eventually(lambda: decided(connection) == {committed: "C", rolled_back: "R"})
        assert announcements.wait(30)


def test_no_thread_takes_part(broker: PostgresBroker) -> None:
    before = threading.enumerate()
    [transaction_id] = halves(broker, 1)
    broker.end_one_way(end(transaction_id))
    broker.notify_decided()
    assert threading.enumerate() == before


def test_what_an_end_meets_leaves_the_incidents_that_a_waiting_one_leaves(
    broker: PostgresBroker, connection: BrokerConnection
) -> None:
    [transaction_id] = halves(broker, 1)
    [plain] = broker.send([message()])
    wrong = [
        end(transaction_id, Decision.ROLLBACK),
        end(transaction_id, group="others"),
        end(plain.message_id),
        end(uuid7()),
    ]
    broker.end([end(transaction_id), end(transaction_id)])
    for one in wrong:
        broker.end([one])
        broker.end_one_way(one)
    assert broker.flush(within_seconds=30)
    incidents = connection.execute("SELECT kind, subject, detail FROM outbox.incident").fetchall()
    assert len(incidents) == 8
    assert len(set(incidents)) == 4
    assert decided(connection)[transaction_id] == "C"


def test_an_ended_session_is_replaced_before_the_next_request_is_written(
    broker: PostgresBroker, connection: BrokerConnection
) -> None:
    first, second = halves(broker, 2)
    broker.end_one_way(end(first))
    eventually(lambda: first in decided(connection))
    [pid] = session(connection)
    connection.execute("SELECT pg_terminate_backend(%s, 30000)", [pid])
    broker.end_one_way(end(second))
    eventually(lambda: second in decided(connection))


def test_what_was_on_its_way_when_the_session_ended_is_sent_again(
    broker: PostgresBroker, connection: BrokerConnection
) -> None:
    broker.notify_decided()
    assert broker.flush(within_seconds=30)
    ids = halves(broker, 50)
    [pid] = session(connection)
    with frozen(pid):
        for one in ids:
            broker.end_one_way(end(one))
        # It dies of this when it continues, and has read none of the written requests.
        os.kill(pid, signal.SIGTERM)
    assert broker.flush(within_seconds=30)
    assert decided(connection) == dict.fromkeys(ids, "C")


def test_where_the_primary_has_become_a_replica_a_new_connection_is_tried(
    broker: PostgresBroker, connection: BrokerConnection
) -> None:
    first, second = halves(broker, 2)
    broker.end_one_way(end(first))
    assert broker.flush(within_seconds=30)
    name = sql.Identifier(connection.info.dbname)
    connection.execute(sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name))
    connection.execute("SELECT pg_terminate_backend(%s, 30000)", session(connection))
    broker.end_one_way(end(second))
    connection.execute(sql.SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name))
    assert broker.flush(within_seconds=30)
    assert decided(connection) == {first: "C", second: "C"}


def test_a_server_that_hangs_makes_no_sender_wait_and_requests_over_the_limit_are_dropped(
    database: BrokerDatabase, connection: BrokerConnection
) -> None:
    one_way = OneWay(database)
    one_way.send(WAKE)
    assert one_way.flush(within_seconds=30)
    [pid] = session(connection)
    requests = [Request(WAKE.text, WAKE.values, "one of many") for _ in range(MAX_QUEUED + 2_000)]
    with frozen(pid):
        for request in requests:
            one_way.send(request)
        assert 0 < one_way.dropped < 2_000
        assert not one_way.flush(within_seconds=0)
    assert one_way.flush(within_seconds=60)
    one_way.close()


def test_of_equal_wake_ups_that_wait_together_one_is_sent(database: BrokerDatabase) -> None:
    one_way = OneWay(database)
    one_way.send(WAKE)
    assert one_way.flush(within_seconds=30)
    with one_way._lock:
        # Another thread is writing: no sender waits for it, and no request is left over.
        for _ in range(99):
            one_way.send(WAKE)
    with tempfile.TemporaryFile() as protocol:
        assert one_way._pgconn is not None
        one_way._pgconn.trace(protocol.fileno())
        one_way.send(WAKE)
        assert one_way.flush(within_seconds=30)
        one_way._pgconn.untrace()
        protocol.seek(0)
        assert protocol.read().count(b"\tSync") == 1
    one_way.close()


def test_ends_of_many_threads_arrive(broker: PostgresBroker, connection: BrokerConnection) -> None:
    ids = halves(broker, 200)

    def send(part: list[UUID]) -> None:
        for one in part:
            broker.end_one_way(end(one))

    threads = [threading.Thread(target=send, args=(ids[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A request that comes while a hundred are unanswered may wait for the next use.
    assert broker.flush(within_seconds=60)
    assert decided(connection) == dict.fromkeys(ids, "C")


def test_without_a_server_no_sender_waits_or_fails() -> None:
    one_way = OneWay(BrokerDatabase("host=/nowhere"))
    for _ in range(100):
        one_way.send(WAKE)
    assert not one_way.flush(within_seconds=0.05)


def test_a_forked_child_has_a_session_of_its_own(broker: PostgresBroker, connection: BrokerConnection) -> None:
    ids = halves(broker, 3)
    broker.end_one_way(end(ids[0]))
    assert broker.flush(within_seconds=30)
    parents = session(connection)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            broker.end_one_way(end(ids[1]))
            gc.collect()
            code = 0 if broker.flush(within_seconds=30) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    broker.end_one_way(end(ids[2]))
    assert broker.flush(within_seconds=30)
    assert decided(connection) == dict.fromkeys(ids, "C")
    assert set(parents) <= set(session(connection)), "the parent's session is the same"


def test_a_request_that_the_server_refuses_is_not_in_the_way_of_the_next(
    broker: PostgresBroker, connection: BrokerConnection
) -> None:
    [transaction_id] = halves(broker, 1)
    broker._one_way.send(Request(b"SELECT 1 / 0", (), "a division"))
    broker.end_one_way(end(transaction_id))
    eventually(lambda: transaction_id in decided(connection))


def test_an_error_in_the_middle_of_writing_leaves_no_answer_to_wait_for(
    broker: PostgresBroker, connection: BrokerConnection
) -> None:
    first, second = halves(broker, 2)
    broker.end_one_way(end(first))
    assert broker.flush(within_seconds=30)
    unwritable = Request(b"SELECT $1", cast(tuple[bytes], (object(),)), "what cannot be written")
    with pytest.raises(TypeError):
        broker._one_way.send(unwritable)
    outcome: list[bool] = []

    def go_on() -> None:
        broker.end_one_way(end(second))
        outcome.append(broker.flush(within_seconds=30))

    # Apart from this thread, which would never come back.
    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    thread.join(60)
    assert outcome == [True]
    assert decided(connection) == dict.fromkeys([first, second], "C")


def test_an_exception_of_a_signal_handler_leaves_the_connection_free(database: BrokerDatabase) -> None:
    """Python runs a signal handler after a call has returned, as it runs a profiler."""
    sender = OneWay(database)
    for wanted in range(20):
        returned = itertools.count()

        def interrupt(frame: FrameType, event: str, _: object, wanted: int = wanted, returned: Any = returned) -> None:
            if event == "c_return" and frame.f_code is OneWay.send.__code__ and next(returned) == wanted:
                raise InterruptedError

        sys.setprofile(interrupt)
        with contextlib.suppress(InterruptedError):
            sender.send(WAKE)
        sys.setprofile(None)
        assert not sender._lock.locked()
    assert sender.flush(within_seconds=30)
    sender.close()


def prepared(sender: OneWay) -> bool | None:
    return None if sender._prepared is None else bool(sender._prepared)


@pytest.mark.parametrize("spoil", ["DEALLOCATE ALL", "SELECT no_such_function($1)"])
def test_a_request_that_cannot_be_prepared_stops_no_later_one(
    broker: PostgresBroker, connection: BrokerConnection, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    """DEALLOCATE ALL stands for an unknown pooler that passes on the process id of the server."""
    first, lost, *later = halves(broker, 4)
    broker.notify_decided()
    assert broker.flush(within_seconds=30)
    broker.end_one_way(end(first))
    broker._one_way.send(Request(spoil.encode(), (b"1",) if "$1" in spoil else (), "the spoiling request"))
    broker.end_one_way(end(lost))
    assert broker.flush(within_seconds=30)
    for transaction_id in later:
        broker.end_one_way(end(transaction_id))
        assert broker.flush(within_seconds=30)
    is_gone = spoil == "DEALLOCATE ALL"
    assert prepared(broker._one_way) is (None if is_gone else True)
    # Check-back decides a transaction whose end message was lost.
    assert set(decided(connection)) == {first, *later} | (set() if is_gone else {lost})
    assert len(caplog.records) == 1


def test_nothing_is_prepared_if_the_settings_name_a_pooler(
    database: BrokerDatabase, connection: BrokerConnection
) -> None:
    broker = PostgresBroker(BrokerDatabase(database.conninfo, listen_conninfo=""))
    [transaction_id] = halves(broker, 1)
    broker.end_one_way(end(transaction_id))
    assert broker.flush(within_seconds=30)
    assert prepared(broker._one_way) is None
    assert decided(connection) == {transaction_id: "C"}
    broker.close()


def test_a_notification_does_not_wait_for_the_disk(broker: PostgresBroker, connection: BrokerConnection) -> None:
    flushed = "SELECT pg_current_wal_flush_lsn() < pg_current_wal_insert_lsn()"
    broker.notify_decided()
    assert broker.flush(within_seconds=30)
    # Another process of the server may flush at any moment.
    eventually(lambda: _notified(broker, connection, flushed))


def _notified(broker: PostgresBroker, connection: BrokerConnection, flushed: str) -> bool:
    broker.notify_decided()
    assert broker.flush(within_seconds=30)
    [(is_ahead,)] = connection.execute(flushed).fetchall()
    return bool(is_ahead)
