"""The index of the keys of a searchable topic: built, used, rebuilt and dropped, without a wait of publishers."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from outbox.broker.database.connection import BrokerConnection
from outbox.broker.database.executor import Executor
from outbox.broker.database.statement import Statement
from outbox.broker.log.topics import declare_topics, find_topic_id, list_topics
from outbox.broker.operations import search
from outbox.broker.schema import key_index
from outbox.topic import Topic
from tests.support import eventually

SEARCHABLE = Topic(name="customers", searchable=True)
OTHER = Topic(name="clicks")

_INDEXES = """
SELECT relname::text, pg_class.oid::bigint, indisvalid FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
WHERE indrelid = 'outbox.commit_log'::regclass AND relname LIKE 'commit_log_key%'
"""
_FILL = """
INSERT INTO outbox.commit_log (born_at, transaction_id, message_id, topic_id, half, key, tag, content_type, body)
SELECT now(), gen_random_uuid(), gen_random_uuid(), %s, false, 'k' || (number %% 1000), '', 'application/json', '1'
FROM generate_series(1, 5000) AS number
"""


@pytest.fixture
def run(connection: BrokerConnection) -> Executor:
    run = Executor(connection, "outbox")
    declare_topics(run, [SEARCHABLE, OTHER])
    return run


def indexes(run: Executor) -> dict[str, tuple[int, bool]]:
    return {name: (oid, valid) for name, oid, valid in run.connection.execute(_INDEXES).fetchall()}


def fill(run: Executor) -> None:
    for topic in (SEARCHABLE, OTHER):
        run.connection.execute(_FILL, [find_topic_id(run, topic.name)])
    run.connection.execute("ANALYZE outbox.commit_log")


def plan(run: Executor, statement: Statement, values: dict[str, Any]) -> str:
    text, names = statement.on("outbox")
    cursor = psycopg.RawCursor(run.connection)
    rows = cursor.execute(b"EXPLAIN " + text, [values[name] for name in names], prepare=False).fetchall()
    return "\n".join(line for (line,) in rows)


def test_the_index_follows_the_declaration(run: Executor) -> None:
    said: list[str] = []
    name = f"commit_log_key_of_{find_topic_id(run, 'customers')}"
    assert key_index.missing(run) == ["customers"]
    key_index.adapt(run, report=said.append)
    built = indexes(run)
    assert [*built] == [name] and built[name][1]
    assert key_index.missing(run) == [] and len(said) == 1
    key_index.adapt(run, report=said.append)
    assert indexes(run) == built and len(said) == 1
    # A build that was interrupted.
    run.connection.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = %s", [built[name][0]])
    assert key_index.missing(run) == ["customers"]
    key_index.adapt(run, report=said.append)
    again = indexes(run)
    assert [*again] == [name] and again[name][1] and again != built
    # The topic keeps the option through a declaration that other code makes of what it has read.
    [topic] = [one for one in list_topics(run) if one.name == "customers"]
    assert topic == SEARCHABLE
    declare_topics(run, [replace(topic, searchable=False)])
    key_index.adapt(run, report=said.append)
    assert indexes(run) == {} and key_index.missing(run) == []


def test_a_search_reads_the_index_and_finds_the_same(run: Executor) -> None:
    fill(run)
    found = search.find_messages(run, "k7", "customers")
    assert len(found) == 5
    key_index.adapt(run)
    assert search.find_messages(run, "k7", "customers") == found
    values = dict.fromkeys(("since", "until", "before", "state")) | {"key": "k7", "limit": 100}
    for topic, reads in (("customers", True), ("clicks", False)):
        values["topic_id"] = find_topic_id(run, topic)
        assert ("commit_log_key_of_" in plan(run, search._WITHOUT_CONTENT, values)) is reads
    assert search.find_messages(run, "k7", "no such topic") == []


def test_a_build_waits_for_open_transactions_and_publishers_do_not_wait_for_it(run: Executor, broker_url: str) -> None:
    topic_id = find_topic_id(run, "customers")
    insert = (
        "INSERT INTO outbox.commit_log (born_at, transaction_id, message_id, topic_id, half, key, tag, content_type,"
        " body) VALUES (now(), gen_random_uuid(), %s, %s, false, 'k', '', 'application/json', '1')"
    )
    early, late = uuid4(), uuid4()
    with psycopg.connect(broker_url) as publisher, psycopg.connect(broker_url, autocommit=True) as builder:
        publisher.execute(insert, [early, topic_id])
        building = threading.Thread(target=key_index.adapt, args=[Executor(builder, "outbox")])
        building.start()
        progress = "SELECT phase FROM pg_stat_progress_create_index WHERE phase LIKE 'waiting%'"
        eventually(lambda: run.connection.execute(progress).fetchall() != [])
        # Another installation leaves the index alone, and another publisher does not wait.
        key_index.adapt(run)
        run.connection.execute("SET lock_timeout = '1s'")
        run.connection.execute(insert, [late, topic_id])
        publisher.commit()
        building.join(30)
        assert not building.is_alive()
    assert key_index.missing(run) == []
    assert {one.message_id for one in search.find_messages(run, "k", "customers")} == {early, late}
