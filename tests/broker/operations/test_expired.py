"""A group that did not consume until the hard cap: its messages are expired, and every report says so."""

from __future__ import annotations

from outbox.broker.operations.queue_status import list_queues
from outbox.broker.operations.status import broker_status
from outbox.broker.operations.trace import trace
from tests.broker.bench import ConsumptionBench
from tests.broker.operations.support import age, clean, consume, group_of, publish


def test_a_sleeping_group_has_expired_messages_not_lost_ones(bench: ConsumptionBench) -> None:
    bench.declare("orders", queues=1)
    publish(bench, "before")
    consume(bench, "sleeper")
    consume(bench)
    kept, *_ = publish(bench, "bad", "a", "b")
    consume(bench)
    age(bench, 40)
    assert [counts.expired for counts in clean(bench)] == [3]
    publish(bench, "c")
    consume(bench)

    group = group_of(bench, "sleeper")
    assert (group.queued, group.handled, group.lag, group.expired, group.missed) == (5, 1, 1, 3, 3)
    status = broker_status(bench.run)
    (problem,) = (text for text in status.problems if "no process" not in text)
    assert "'sleeper': 3 messages have expired" in problem and "outbox_group delete sleeper" in problem
    (incident,) = (one for one in status.incidents if one["kind"] == "expired")
    assert incident["subject"] == "orders"
    assert "3 messages of queue 0" in incident["detail"] and "'sleeper' had not" in incident["detail"]
    (queue,) = (one for one in list_queues(bench.run, "sleeper") if one.topic == "orders")
    assert (queue.lag, queue.expired) == (1, 3)
    # Another group's dead letter is kept: the sleeper has lost it all the same.
    found = trace(bench.run, kept.message_id)
    assert found is not None
    assert {entry.group: str(entry.state) for entry in found.entries} == {"g": "dead", "sleeper": "expired"}

    assert consume(bench, "sleeper") == ["c"]
    group = group_of(bench, "sleeper")
    assert (group.handled, group.lag, group.expired, group.missed) == (2, 0, 3, 0)
    assert [text for text in broker_status(bench.run).problems if "no process" not in text] == []
