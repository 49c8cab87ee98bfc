"""Which messages an erasure finds, and what it erases of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from outbox import hooks
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import declare_topics, find_topic_id
from outbox.broker.operations.dead_letters import LetterSelection, lock
from outbox.broker.schema import key_index
from outbox.contrib.erasure import broker_rows
from tests.broker.bench import ConsumptionBench
from tests.broker.operations.support import consume, publish
from tests.broker.schema.test_key_index import OTHER, SEARCHABLE, fill, plan
from tests.broker.test_hostile_rows import _ROW, HOSTILE, NOT_LOADED, row
from tests.support import eventually


def test_an_erasure_reads_the_index_of_a_searchable_topic_and_finds_the_same(bench: ConsumptionBench) -> None:
    run = Executor(bench.connection, "outbox")
    declare_topics(run, [SEARCHABLE, OTHER])
    fill(run)
    found = broker_rows.find_keys(run, "customers", ["k7"])
    assert len(found) == 5
    key_index.adapt(run)
    assert broker_rows.find_keys(run, "customers", ["k7"]) == found
    for topic, reads in (("customers", True), ("clicks", False)):
        values = {"topic_id": find_topic_id(run, topic), "keys": ["k7", "erased:1"]}
        assert ("commit_log_key_of_" in plan(run, broker_rows._OF_KEYS, values)) is reads
    assert broker_rows.find_keys(run, "no such topic", ["k7"]) == []


def test_rows_that_no_consumer_can_read_are_erased(bench: ConsumptionBench) -> None:
    bench.declare("orders")
    hostile = [*HOSTILE.values(), *NOT_LOADED.values()]
    for values in hostile:
        bench.connection.execute(_ROW, row(bench, **{**values, "topic_id": row(bench)["topic_id"]}))
    [(kept,)] = bench.rows("SELECT array_agg(log_id) FROM outbox.commit_log")
    values = {"erased": "erased", "replacement": None, "kept": ["a"], "log_ids": kept}
    assert bench.run.execute(dict(broker_rows._PLACES)["commit_log"], values).rowcount == len(hostile)
    assert bench.rows("SELECT sum(octet_length(body)) FROM outbox.commit_log") == [(0,)]


def test_an_erasure_and_an_edit_lock_dead_letter_and_message_in_one_order(
    bench: ConsumptionBench, database: BrokerDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The service that erases need not have the part that edits.
    monkeypatch.setattr(hooks, "broker_content", {})
    bench.declare("orders", queues=1)
    consume(bench)
    [bad] = publish(bench, "bad")
    consume(bench)
    [one] = broker_rows.find_ids(bench.run, "orders", [bad.message_id])
    with database.connect() as editing, database.connect() as erasing, ThreadPoolExecutor(1) as pool:
        for one_of_both in (editing, erasing):
            one_of_both.execute("BEGIN")
        # As an edit does (outbox/contrib/editing): first the letter, then its message.
        assert lock(Executor(editing, "outbox"), "g", LetterSelection(), limit=10) == [one.log_id]
        erased = pool.submit(broker_rows.erase, Executor(erasing, "outbox"), "orders", [one])
        pid = erasing.info.backend_pid
        eventually(lambda: bench.rows("SELECT pg_blocking_pids(%s) <> '{}'", pid) == [(True,)])
        editing.execute("SELECT FROM outbox.commit_log WHERE log_id = %s FOR UPDATE", [one.log_id])
        editing.execute("COMMIT")
        assert erased.result()["dead_letter"] == 1
