"""Which messages an erasure finds, and what it erases of them."""

from __future__ import annotations

from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import declare_topics, find_topic_id
from outbox.broker.schema import key_index
from outbox.contrib.erasure import broker_rows
from tests.broker.bench import ConsumptionBench
from tests.broker.schema.test_key_index import OTHER, SEARCHABLE, fill, plan
from tests.broker.test_hostile_rows import _ROW, HOSTILE, NOT_LOADED, row


def test_an_erasure_reads_the_index_of_a_searchable_topic_and_finds_the_same(bench: ConsumptionBench) -> None:
    run = Executor(bench.connection, "outbox")
    declare_topics(run, [SEARCHABLE, OTHER])
    fill(run)
    found = broker_rows.find_key(run, "customers", "k7")
    assert len(found) == 5
    key_index.adapt(run)
    assert broker_rows.find_key(run, "customers", "k7") == found
    for topic, reads in (("customers", True), ("clicks", False)):
        values = {"topic_id": find_topic_id(run, topic), "key": "k7"}
        assert ("commit_log_key_of_" in plan(run, broker_rows._OF_KEY, values)) is reads
    assert broker_rows.find_key(run, "no such topic", "k7") == []


def test_rows_that_no_consumer_can_read_are_erased(bench: ConsumptionBench) -> None:
    bench.declare("orders")
    hostile = [*HOSTILE.values(), *NOT_LOADED.values()]
    for values in hostile:
        bench.connection.execute(_ROW, row(bench, **{**values, "topic_id": row(bench)["topic_id"]}))
    [(kept,)] = bench.rows("SELECT array_agg(log_id) FROM outbox.commit_log")
    values = {"erased": "erased", "replacement": None, "kept": ["a"], "log_ids": kept}
    assert bench.run.execute(dict(broker_rows._PLACES)["commit_log"], values).rowcount == len(hostile)
    assert bench.rows("SELECT sum(octet_length(body)) FROM outbox.commit_log") == [(0,)]
