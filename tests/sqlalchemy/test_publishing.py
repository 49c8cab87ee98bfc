"""`publish` from a session: the message shares the fate of the row, and a failed call cannot be overlooked."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox import errors
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log.commit_log import append_decided
from outbox.broker.log.topics import TopicCatalog, declare_topics
from outbox.broker.operations.changes import reject_transactional
from outbox.broker.operations.deletion import delete_topic
from outbox.codec import BytesCodec, Codecs
from outbox.contrib.sqlalchemy import Publisher, apublish, publish
from outbox.contrib.sqlalchemy.publishing import _failed, _published
from outbox.message import Message, SendReceipt
from outbox.topic import Topic
from tests.broker.support import drain, new_sequencer, queued
from tests.sqlalchemy.support import DRIVERS, Order, in_session, stored, url_of
from tests.support import eventually

COLUMNS = (
    "topic_id, shard, half, key, tag, content_type, headers, body, producer_group, transaction_id = message_id,"
    " round(extract(epoch FROM deliver_at - stored_at) / 60)"
)


def place(session: Session, number: str, topic: str = "orders", **named: Any) -> SendReceipt:
    session.add(Order(number=number))
    return publish(session, topic, {"number": number}, **named)


@pytest.mark.parametrize("driver", DRIVERS)
def test_row_and_message_commit_together_or_not_at_all(
    driver: str, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    def work(session: Session) -> list[SendReceipt]:
        receipts = [place(session, "committed")]
        session.commit()
        place(session, "rolled back")
        session.rollback()
        receipts.append(place(session, "around"))
        with session.begin_nested():
            receipts.append(place(session, "released"))
        savepoint = session.begin_nested()
        place(session, "in savepoint")
        savepoint.rollback()
        session.commit()
        place(session, "committed")
        with pytest.raises(IntegrityError):
            session.commit()
        session.rollback()
        place(session, "never ended")
        return receipts

    receipts = in_session(database.conninfo, driver, work)
    expected = ["around", "committed", "released"]
    assert stored(connection) == (expected, expected)
    drain(new_sequencer(database), connection)
    assert {one.message_id for one in queued(connection)} == {one.message_id for one in receipts}
    assert {(one.topic, one.position, one.duplicate_of) for one in receipts} == {("orders", None, None)}
    assert all(one.transaction_id == one.message_id for one in receipts)


@pytest.mark.parametrize("driver", DRIVERS)
def test_it_stores_what_the_atomic_path_of_django_stores(
    driver: str, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    due, key = datetime.now(UTC) + timedelta(minutes=30), uuid.uuid4()
    given: list[tuple[str, dict[str, Any]]] = [
        ("orders", {}),
        ("orders", {"key": "k ü", "tag": "paid", "headers": {"Trace-Id": "t:1 %s €"}}),
        ("ordered", {"key": key, "deliver_at": due}),
        ("ordered", {"key": 7, "delay": 600}),
        ("orders", {"delay": timedelta(minutes=20), "timeout": 1.5}),
    ]

    def work(session: Session) -> None:
        for topic, named in given:
            publish(session, topic, {"who": "Zoë %(x)s :y"}, **named)
        session.commit()

    in_session(database.conninfo, driver, work)
    body = '{"who":"Zoë %(x)s :y"}'.encode()
    ours = [
        Message(topic="orders", body=body),
        Message(topic="orders", body=body, key="k ü", tag="paid", headers={"Trace-Id": "t:1 %s €"}),
        Message(topic="ordered", body=body, key=str(key), deliver_at=due),
        Message(topic="ordered", body=body, key="7", delay=timedelta(minutes=10)),
        Message(topic="orders", body=body, delay=timedelta(minutes=20), headers={"outbox-timeout": "1.5"}),
    ]
    with connection.transaction():
        for message in ours:
            append_decided(Executor(connection, "outbox"), TopicCatalog(), [message], transactional=True)
    rows = connection.execute(f"SELECT {COLUMNS} FROM outbox.commit_log ORDER BY log_id").fetchall()
    assert rows[: len(given)] == rows[len(given) :]


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("hostile")

    __repr__ = __str__


REFUSED: list[tuple[dict[str, Any], type[errors.OutboxError], str]] = [
    ({"topic": "ordres"}, errors.UnknownTopic, "Did you mean 'orders'"),
    ({"topic": "no topic"}, errors.InvalidName, "topic name 'no topic' is not allowed"),
    ({"topic": "plain"}, errors.MessageTypeMismatch, "add TRANSACTION to its types"),
    ({"topic": "ordered"}, errors.InvalidMessage, "needs a key"),
    ({"key": "\x00"}, errors.InvalidName, "key"),
    ({"key": Hostile()}, errors.OutboxError, "key"),
    ({"headers": {"a": 1}}, errors.InvalidName, "header 'a'"),
    ({"body": "x" * 5_000_000}, errors.BodyTooLarge, "the limit is 4,194,304"),
    ({"body": {1, 2}}, errors.UnserialisableBody, "set is not JSON"),
    ({"delay": 1, "deliver_at": datetime.now(UTC)}, errors.UsageError, "not both"),
    ({"deliver_at": datetime(2030, 1, 1)}, errors.InvalidMessage, "has no time zone"),  # noqa: DTZ001
    ({"timeout": 400 * 24 * 3600}, errors.InvalidMessage, "has a time limit of"),
]


def test_what_django_refuses_is_refused_and_the_transaction_cannot_commit(
    engine: Engine, connection: BrokerConnection
) -> None:
    with Session(engine) as session:
        for number, (given, kind, said) in enumerate(REFUSED):
            arguments = {"topic": "orders", "body": {}, **given}
            with pytest.raises(kind) as raised:
                publish(session, **arguments)
            assert said in str(raised.value), given
            session.add(Order(number=str(number)))
            with pytest.raises(errors.TransactionUsageError, match="earlier publish call"):
                publish(session, "orders", {})
            with pytest.raises(errors.TransactionUsageError, match="a publish call in it failed"):
                session.commit()
            session.rollback()
        place(session, "after all of them")
        session.commit()
    assert stored(connection) == (["after all of them"], ["after all of them"])


def test_a_call_that_fails_in_a_savepoint_takes_only_the_savepoint_along(
    engine: Engine, connection: BrokerConnection
) -> None:
    with Session(engine) as session:
        place(session, "around")
        with pytest.raises(errors.UnknownTopic), session.begin_nested():
            place(session, "left by the error", topic="ordres")
        with pytest.raises(errors.TransactionUsageError, match="a publish call in it failed"), session.begin_nested():
            with pytest.raises(errors.UnknownTopic):
                place(session, "caught inside", topic="ordres")
        session.commit()
    assert stored(connection) == (["around"], ["around"])
    with pytest.raises(errors.TransactionUsageError), Session(engine) as session, session.begin():
        with pytest.raises(errors.InvalidName):
            place(session, "first call of the session", key="\x00")
    assert stored(connection) == (["around"], ["around"])


def test_the_checks_of_the_server_have_the_errors_of_outbox(engine: Engine, connection: BrokerConnection) -> None:
    run = Executor(connection, "outbox")

    def refused(kind: type[errors.OutboxError], said: str, topic: str = "orders") -> None:
        with Session(engine) as session:
            with pytest.raises(kind, match=said):
                place(session, "refused", topic=topic)
            with pytest.raises(errors.TransactionUsageError, match="a publish call in it failed"):
                session.commit()

    with Session(engine) as session:
        place(session, "before")
        session.commit()
    limit = "UPDATE outbox.topic SET backlog_limit = 1, over_limit = %s WHERE name = 'orders'"
    connection.execute(limit, ['{"reason": "too many"}'])
    refused(errors.TopicOverLimit, "too many")
    connection.execute(limit, [None])
    reject_transactional(run, True)
    refused(errors.TransactionalMessagesRejected, "operator")
    reject_transactional(run, False)
    # The topics that the session's process knows are those of before.
    connection.execute("UPDATE outbox.topic SET message_types = '{NORMAL}' WHERE name = 'orders'")
    refused(errors.InvalidMessage, "add TRANSACTION to its types")
    connection.execute("UPDATE outbox.topic SET message_types = '{NORMAL,TRANSACTION}' WHERE name = 'orders'")
    delete_topic(run, "orders")
    refused(errors.UnknownTopic, "install URL` --topic NAME")
    # A declaration counts at once.
    declare_topics(run, [Topic(name="orders"), Topic(name="new")])
    with Session(engine) as session:
        place(session, "after")
        place(session, "on a new topic", topic="new")
        session.commit()
    connection.execute("DROP SCHEMA outbox CASCADE")
    refused(errors.SchemaError, "create them: `python -m outbox.contrib.sqlalchemy install URL`", topic="other")
    refused(errors.SchemaError, "Connect to the database with the broker's tables")


def test_a_transaction_that_cannot_hold_the_message_is_refused(engine: Engine, database: BrokerDatabase) -> None:
    with Session(engine) as session:
        session.execute(text("SELECT 1"))
        with pytest.raises(psycopg.errors.DivisionByZero):
            session.connection().connection.cursor().execute("SELECT 1/0")
        with pytest.raises(errors.TransactionUsageError, match=r"begin_nested"):
            publish(session, "orders", {})
    with Session(engine, autobegin=False) as session:
        with pytest.raises(errors.TransactionRequired, match="autobegin=False"):
            publish(session, "orders", {})
    with Session(engine) as session:
        session.add_all([Order(number="1"), Order(number="1")])
        with pytest.raises(IntegrityError):
            session.flush()
        with pytest.raises(errors.TransactionUsageError, match=r"transaction has been rolled back .* run the whole"):
            publish(session, "orders", {})
    with Session(create_engine("sqlite://")) as session:
        with pytest.raises(errors.NotSupported, match="the session's database is sqlite"):
            publish(session, "orders", {})
    with pytest.raises(errors.UsageError, match="apublish takes an AsyncSession"):
        publish(AsyncSession(), "orders", {})  # type: ignore[arg-type]
    with Session(engine) as session, pytest.raises(errors.UsageError, match="publish takes a Session"):
        asyncio.run(apublish(session, "orders", {}))  # type: ignore[arg-type]
    nowhere = create_engine("postgresql+psycopg:///nothing?host=/nonexistent")
    with Session(nowhere) as session, pytest.raises(errors.SendFailed, match="run the whole operation again"):
        publish(session, "orders", {})


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_connection_in_autocommit_is_refused(
    driver: str, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    def work(session: Session) -> None:
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        with pytest.raises(errors.TransactionRequired, match="AUTOCOMMIT"):
            publish(session, "orders", {})

    in_session(database.conninfo, driver, work)
    assert stored(connection) == ([], [])


@pytest.mark.parametrize("driver", DRIVERS)
def test_after_a_handmade_commit_no_message_is_stored_without_a_transaction(
    driver: str, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    def work(session: Session) -> None:
        place(session, "before")
        session.flush()
        session.execute(text("COMMIT"))
        # psycopg 3 sees it, and begins a transaction; asyncpg would let the message commit by itself.
        with (
            contextlib.nullcontext()
            if "psycopg" in driver
            else pytest.raises(errors.TransactionRequired, match="by a COMMIT")
        ):
            publish(session, "orders", {"number": "after"})
        session.rollback()
        place(session, "next")
        session.commit()

    in_session(database.conninfo, driver, work)
    assert stored(connection) == (["before", "next"], ["before", "next"])


def test_each_kind_of_session_publishes(engine: Engine, database: BrokerDatabase, connection: BrokerConnection) -> None:
    registry = scoped_session(sessionmaker(engine))
    registry.add(Order(number="scoped"))
    publish(registry, "orders", {"number": "scoped"})
    registry.commit()
    registry.remove()

    with Session(binds={Order: engine}) as session:
        place(session, "binds", bind_arguments={"mapper": Order})
        session.commit()

    with engine.connect() as joined, joined.begin():
        with Session(joined, join_transaction_mode="create_savepoint") as session:
            place(session, "joined")
            session.commit()

    async def run() -> None:
        of_async = create_async_engine(url_of(database.conninfo))
        async with AsyncSession(of_async) as session, session.begin():
            session.add(Order(number="async"))
            await apublish(session, "orders", {"number": "async"}, key=1)
        scoped = async_scoped_session(async_sessionmaker(of_async), scopefunc=asyncio.current_task)
        scoped.add(Order(number="async scoped"))
        await apublish(scoped, "orders", {"number": "async scoped"})
        await scoped.commit()
        await scoped.remove()
        await of_async.dispose()

    asyncio.run(run())
    expected = ["async", "async scoped", "binds", "joined", "scoped"]
    assert stored(connection) == (expected, expected)


def test_a_cancelled_call_takes_the_transaction_along(database: BrokerDatabase, connection: BrokerConnection) -> None:
    """The key is locked by another transaction while the call waits for it."""

    async def run() -> None:
        engine = create_async_engine(url_of(database.conninfo))
        async with AsyncSession(engine) as first, AsyncSession(engine) as second:
            await apublish(first, "ordered", {"number": "first"}, key="k")
            second.add(Order(number="second"))
            waiting = asyncio.create_task(apublish(second, "ordered", {"number": "second"}, key="k"))
            await asyncio.sleep(0.1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            with pytest.raises(errors.TransactionUsageError, match="CancelledError"):
                await second.commit()
        await engine.dispose()

    asyncio.run(run())
    assert stored(connection) == ([], [])


def test_a_key_of_a_fifo_topic_is_locked_before_the_position_is_drawn(
    engine: Engine, connection: BrokerConnection
) -> None:
    def second() -> None:
        with Session(engine) as session:
            place(session, "second", topic="ordered", key="k")
            session.commit()

    with Session(engine) as session:
        place(session, "first", topic="ordered", key="k")
        with Session(engine) as other:
            place(other, "of another key", topic="ordered", key="other")
            other.commit()
        thread = threading.Thread(target=second)
        thread.start()
        eventually(
            lambda: connection.execute("SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").fetchall(),
            what="the second transaction waits",
        )
        publish(session, "ordered", {"number": "first again"}, key="k")
        session.commit()
        thread.join()
    rows = connection.execute("SELECT body FROM outbox.commit_log WHERE key = 'k' ORDER BY log_id").fetchall()
    assert [body for (body,) in rows] == [
        b'{"number":"first"}',
        b'{"number":"first again"}',
        b'{"number":"second"}',
    ]


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_leader_is_woken_after_commit_only(
    driver: str, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    connection.execute("LISTEN outbox_decided")
    notified: list[psycopg.Notify] = []
    connection.add_notify_handler(notified.append)

    def woken() -> int:
        """The notifications since the last call; the server sends them with the answer to a statement at the latest."""
        connection.execute("SELECT 1")
        try:
            return len(notified)
        finally:
            notified.clear()

    def work(session: Session) -> list[int]:
        seen = []
        with session.begin_nested():
            place(session, "1")
        seen.append(woken())
        place(session, "2")
        session.commit()
        seen.append(woken())
        place(session, "3")
        session.rollback()
        session.add(Order(number="without a message"))
        session.commit()
        seen.append(woken())
        return seen

    assert in_session(database.conninfo, driver, work) == [0, 1, 0]


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_wake_up_that_fails_is_no_error_of_the_commit(
    driver: str, database: BrokerDatabase, connection: BrokerConnection
) -> None:
    def prepare(engine: Engine) -> None:
        @event.listens_for(engine, "before_cursor_execute")
        def end_session(connected: Connection, cursor: Any, statement: str, *rest: Any) -> None:
            if statement.startswith("NOTIFY"):
                connection.execute(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database()"
                    " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
                )

    def work(session: Session) -> None:
        place(session, "1")
        session.commit()
        place(session, "2")
        session.commit()

    in_session(database.conninfo, driver, work, prepare)
    assert stored(connection) == (["1", "2"], ["1", "2"])


def test_nothing_is_kept_of_transactions_that_have_ended(engine: Engine) -> None:
    def use(number: str, end: Callable[[Session], None]) -> None:
        with Session(engine) as session:
            place(session, number)
            with pytest.raises(errors.UnknownTopic), session.begin_nested():
                place(session, "left out", topic="ordres")
            end(session)

    use("1", Session.commit)
    use("2", Session.rollback)
    gc.collect()
    assert (len(_failed), len(_published)) == (0, 0)


def test_a_publisher_has_codecs_and_a_schema_of_its_own(engine: Engine, connection: BrokerConnection) -> None:
    publisher = Publisher(codecs=Codecs(by_topic={"orders": BytesCodec()}))
    with Session(engine) as session:
        publisher.publish(session, "orders", b"\x00\xff")
        session.commit()
    rows = connection.execute("SELECT content_type, body FROM outbox.commit_log").fetchall()
    assert rows == [("application/octet-stream", b"\x00\xff")]
    elsewhere = Publisher(schema="elsewhere")
    with Session(engine) as session, pytest.raises(errors.SchemaError, match="in schema 'elsewhere'"):
        elsewhere.publish(session, "orders", {})
    with pytest.raises(errors.ConfigurationError, match="not allowed"):
        Publisher(schema="x; DROP")
