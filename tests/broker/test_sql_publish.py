"""`SELECT outbox.publish(…)`: a trigger or another language stores the same rows as the atomic path, or is refused."""

from __future__ import annotations

import contextlib
import json
import random
import string
import threading
import uuid
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log.commit_log import append_decided
from outbox.broker.log.topics import TopicCatalog, declare_topics
from outbox.broker.operations.deletion import delete_topic
from outbox.broker.postgres import PostgresBroker
from outbox.broker.schema.install import install
from outbox.contrib.django.publishing.publish import _lock_number
from outbox.message import Message
from tests.broker.support import TOPICS, drain, new_sequencer, queued_ids
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("broker")
# Each message has its own ones, and the space in a JSON body differs.
OWN = ["log_id", "xid", "stored_at", "born_at", "message_id", "transaction_id", "body"]


def publish(connection: psycopg.Connection[Any], topic: str = "orders", body: Any = None, **named: Any) -> uuid.UUID:
    given = sql.SQL(", ").join(sql.SQL("{} => %s").format(sql.Identifier(name)) for name in named)
    call = sql.SQL("SELECT outbox.publish(%s, %s{} {})").format(sql.SQL("," if named else ""), given)
    values = [Jsonb(value) if name == "headers" else value for name, value in named.items()]
    row = connection.execute(call, [topic, Jsonb({"n": 1} if body is None else body), *values]).fetchone()
    assert row is not None
    return row[0]  # type: ignore[no-any-return]


def text(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(string.printable + "äß€𝄞漢") for _ in range(length))


def test_the_lock_and_the_shard_are_those_of_every_other_producer(connection: BrokerConnection) -> None:
    rng = random.Random(7)
    pairs = [("orders", text(rng, length)) for length in (*range(1, 12), 57, 58, 120, 121, 122, 240, 255)]
    pairs += [("t" * 127, text(rng, 255)), ("t", "€" * 255)]
    rows = connection.execute(
        "SELECT outbox.key_lock_number(topic, key), outbox.key_shard(key) FROM unnest(%s::text[], %s::text[])"
        " WITH ORDINALITY AS given (topic, key, place) ORDER BY place",
        [[topic for topic, _ in pairs], [key for _, key in pairs]],
    ).fetchall()
    assert rows == [(_lock_number(topic, key), zlib.crc32(key.encode()) & 0x7FFFFFFF) for topic, key in pairs]


def test_it_stores_what_the_atomic_path_stores(connection: BrokerConnection) -> None:
    due = datetime.now(UTC) + timedelta(hours=1)
    named: list[dict[str, Any]] = [
        {},
        {"key": "k ü", "tag": "paid", "headers": {"Trace-Id": "t"}},
        {"key": "k", "deliver_at": due},
    ]
    theirs = [publish(connection, body={"n": 1, "who": "Zoë"}, producer_group="shop", **one) for one in named]
    body = json.dumps({"n": 1, "who": "Zoë"}).encode()
    ours = [Message(topic="orders", body=body, **one) for one in named]
    with connection.transaction():
        run = Executor(connection, "outbox")
        for message in ours:
            append_decided(run, TopicCatalog(), [message], producer_group="shop", transactional=True)
    columns = connection.execute(
        "SELECT attname::text FROM pg_attribute WHERE attrelid = 'outbox.commit_log'::regclass AND attnum > 0"
        " AND NOT attisdropped AND attname <> ALL(%s)",
        [OWN],
    ).fetchall()
    assert len(columns) > 8
    compared = sql.SQL(", ").join(sql.Identifier(name) for (name,) in columns)
    statement = sql.SQL("SELECT transaction_id = message_id, {} FROM outbox.commit_log ORDER BY log_id")
    rows = connection.execute(statement.format(compared)).fetchall()
    assert rows[:3] == rows[3:]
    bodies = connection.execute("SELECT body FROM outbox.commit_log").fetchall()
    assert [json.loads(found) for (found,) in bodies] == [json.loads(body)] * 6
    decisions = connection.execute("SELECT DISTINCT decision, decided_by FROM outbox.op_log").fetchall()
    assert len(decisions) == 1
    assert {one.version for one in theirs} == {7}
    assert abs((theirs[0].int >> 80) / 1000 - datetime.now(UTC).timestamp()) < 120, "milliseconds lead"


def test_it_shares_the_fate_of_the_transaction_and_of_the_savepoint(
    connection: BrokerConnection, database: BrokerDatabase
) -> None:
    with connection.transaction():
        first = publish(connection)
        with connection.transaction(force_rollback=True):
            publish(connection)
        last = publish(connection)
    with connection.transaction(force_rollback=True):
        publish(connection)
    drain(new_sequencer(database), connection)
    assert sorted(queued_ids(connection)) == sorted([first, last])


def test_a_trigger_publishes_for_a_role_that_may_only_execute(
    connection: BrokerConnection, database: BrokerDatabase, shop_role: psycopg.Connection[Any]
) -> None:
    connection.execute(
        """
        CREATE TABLE public.invoice (number text PRIMARY KEY);
        CREATE FUNCTION public.told() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM outbox.publish('orders', to_jsonb(NEW), key => NEW.number);
            RETURN NEW;
        END $$;
        CREATE TRIGGER told AFTER INSERT ON public.invoice FOR EACH ROW EXECUTE FUNCTION public.told();
        """
    )
    connection.execute(sql.SQL("GRANT INSERT ON public.invoice TO {}").format(role_of(shop_role)))
    shop_role.execute("INSERT INTO public.invoice VALUES ('A-1'), ('A-2')")
    drain(new_sequencer(database), connection)
    assert len(queued_ids(connection)) == 2
    rows = connection.execute("SELECT key, body FROM outbox.commit_log ORDER BY key").fetchall()
    assert rows == [("A-1", b'{"number": "A-1"}'), ("A-2", b'{"number": "A-2"}')]


@pytest.fixture
def shop_role(connection: BrokerConnection, broker_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A role that may publish from SQL, and nothing else."""
    name = f"shop_{uuid.uuid4().hex}"
    role = sql.Identifier(name)
    connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
    connection.execute(sql.SQL("GRANT USAGE ON SCHEMA outbox TO {}").format(role))
    connection.execute(sql.SQL("GRANT EXECUTE ON FUNCTION outbox.publish TO {}").format(role))
    with psycopg.connect(broker_url, autocommit=True) as as_role:
        as_role.execute(sql.SQL("SET SESSION AUTHORIZATION {}").format(role))
        yield as_role
        as_role.execute("RESET SESSION AUTHORIZATION")
    connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
    connection.execute(sql.SQL("DROP ROLE {}").format(role))


def role_of(connection: psycopg.Connection[Any]) -> sql.Identifier:
    row = connection.execute("SELECT current_user::text").fetchone()
    assert row is not None
    return sql.Identifier(row[0])


def test_a_role_has_no_more_than_it_was_granted(
    connection: BrokerConnection, shop_role: psycopg.Connection[Any]
) -> None:
    publish(shop_role)
    for statement in (
        "SELECT * FROM outbox.commit_log",
        "DELETE FROM outbox.op_log",
        "INSERT INTO outbox.commit_log DEFAULT VALUES",
        "SELECT outbox.publish_bytes('orders', '', 'text/plain')",
        "SELECT outbox.key_lock_number('orders', 'k')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            shop_role.execute(statement)
    connection.execute(sql.SQL("REVOKE EXECUTE ON FUNCTION outbox.publish FROM {}").format(role_of(shop_role)))
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        publish(shop_role)


def test_what_the_caller_has_in_its_search_path_is_not_what_is_written(
    connection: BrokerConnection, shop_role: psycopg.Connection[Any]
) -> None:
    """A table of the same name, temporary or not, is none of ours."""
    shop_role.execute("CREATE TEMPORARY TABLE broker AS SELECT true AS reject_transactional")
    shop_role.execute("CREATE TEMPORARY TABLE topic AS SELECT 1 AS topic_id")
    publish(shop_role)
    assert connection.execute("SELECT count(*) FROM outbox.op_log").fetchall() == [(1,)]


def test_fifo_messages_of_a_key_wait_for_each_others_commit(
    connection: BrokerConnection, database: BrokerDatabase, broker_url: str
) -> None:
    """The later caller draws its place only when the earlier one has committed; another key does not wait."""
    ids: list[uuid.UUID] = []

    def later() -> None:
        with psycopg.connect(broker_url) as other:
            ids.append(publish(other, "ordered", key="a"))

    with connection.transaction():
        first = publish(connection, "ordered", key="a")
        thread = threading.Thread(target=later)
        thread.start()
        with psycopg.connect(broker_url, autocommit=True) as third:
            waits = "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database WHERE NOT granted"
            waits += " AND locktype = 'advisory' AND datname = current_database()"
            eventually(lambda: third.execute(waits).fetchone() == (1,), what="the other one waits")
            publish(third, "ordered", key="b")
        assert ids == []
        second = publish(connection, "ordered", key="a")
    thread.join()
    drain(new_sequencer(database), connection)
    assert [one for one in queued_ids(connection, "ordered") if one in (first, second, *ids)] == [first, second, *ids]


def test_what_is_refused(connection: BrokerConnection) -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ("ordres", {}, "topic 'ordres' is not declared"),
        (None, {}, "topic NULL is not declared"),
        ("%RETRY%shop", {}, "is not declared"),
        ("plain", {}, "add TRANSACTION"),
        ("ordered", {}, "is FIFO"),
        ("orders", {"key": "k" * 256}, "keys of up to 255"),
        ("orders", {"tag": "a b"}, "tags of up to 127"),
        ("orders", {"tag": "a|b"}, "tags of up to 127"),
        ("orders", {"tag": "t" * 128}, "tags of up to 127"),
        ("orders", {"headers": []}, "headers as a JSON object"),
        ("orders", {"headers": {"n": 1}}, "values are strings"),
        ("orders", {"headers": {"outbox-timeout": "259200.5"}}, "keeps messages for 259200 s"),
        ("orders", {"headers": {"n" * 65: ""}}, "names are up to 64"),
        ("orders", {"headers": {"1n": ""}}, "names are up to 64"),
        ("orders", {"headers": {"n": "v" * 4097}}, "4096"),
        ("orders", {"headers": {f"n{n}": "" for n in range(65)}}, "up to 64 headers"),
        ("orders", {"deliver_at": "infinity"}, "beyond the years"),
        ("orders", {"deliver_at": "9999-12-31 UTC"}, "cannot deliver at 9999-12-31"),
        ("orders", {"deliver_at": "0001-01-01 UTC"}, "cannot deliver at 0001-01-01"),
        ("orders", {"body": "x" * 4_194_304}, "4194304 bytes"),
        ("orders", {"key": None}, "cannot be null"),
    ]
    for topic, named, says in cases:
        with pytest.raises(psycopg.Error, match=says):
            publish(connection, topic, **named)
        assert connection.execute("SELECT count(*) FROM outbox.commit_log").fetchone() == (0,)


def test_a_deleted_topic_takes_no_messages_until_it_is_declared_again(connection: BrokerConnection) -> None:
    publish(connection)
    delete_topic(Executor(connection, "outbox"), "orders")
    with pytest.raises(psycopg.errors.UndefinedObject, match="'orders' is not declared"):
        publish(connection)
    declare_topics(Executor(connection, "outbox"), TOPICS)
    publish(connection)
    assert connection.execute("SELECT count(*) FROM outbox.commit_log").fetchone() == (2,)


def test_an_operator_can_switch_it_off_and_a_resent_id_stores_nothing(connection: BrokerConnection) -> None:
    given = uuid.uuid4()
    assert [publish(connection, message_id=given) for _ in range(2)] == [given, given]
    assert connection.execute("SELECT count(*) FROM outbox.commit_log").fetchone() == (1,)
    connection.execute("UPDATE outbox.broker SET reject_transactional = true")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        publish(connection)


def test_a_half_message_is_transactional_whatever_its_publisher_says(connection: BrokerConnection) -> None:
    text = (
        "SELECT log_id FROM outbox.append_one(gen_random_uuid(), 1, NULL, '', '', 'text/plain', '', NULL, now(), NULL,"
        " NULL, 'shop', false, true, 60, NULL)"
    )
    assert connection.execute(text).fetchone() != (None,)
    connection.execute("UPDATE outbox.broker SET reject_transactional = true")
    assert connection.execute(text).fetchone() == (None,)


def test_bytes_of_any_content_type_and_another_schema(connection: BrokerConnection, broker_url: str) -> None:
    install(connection, "messages")
    with contextlib.closing(PostgresBroker(BrokerDatabase(conninfo=broker_url, schema="messages"))) as other:
        other.declare(TOPICS)
    connection.execute(
        "SELECT messages.publish_bytes('orders', '\\xff00', 'application/x-own', key => 'k', wake => true)"
    )
    rows = connection.execute("SELECT body, content_type FROM messages.commit_log").fetchall()
    assert rows == [(b"\xff\x00", "application/x-own")]
    assert connection.execute("SELECT count(*) FROM outbox.commit_log").fetchone() == (0,)
