"""A group that did not consume until the hard cap: its messages are expired, and every report says so."""

from __future__ import annotations

from outbox.broker.log import incidents
from outbox.broker.operations import summary
from outbox.broker.operations.audit import count_messages
from outbox.broker.operations.progress import list_queues
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
    (incident,) = (one for one in incidents.recent(bench.run) if one.kind == "expired")
    assert incident.subject == "orders"
    assert "3 messages of queue 0" in incident.detail and "'sleeper' had not" in incident.detail
    (queue,) = (one for one in list_queues(bench.run, "sleeper") if one.topic == "orders")
    assert (queue.lag, queue.expired) == (1, 3)
    (counted,) = (one for one in summary.count(bench.run).groups if (one.group, one.topic) == ("sleeper", "orders"))
    assert (counted.lag, counted.expired) == (1, 3)
    # Another group's dead letter is kept: the sleeper has lost it all the same.
    found = trace(bench.run, kept.message_id)
    assert found is not None
    assert {entry.group: str(entry.state) for entry in found.entries} == {"g": "dead", "sleeper": "expired"}

    assert consume(bench, "sleeper") == ["c"]
    group = group_of(bench, "sleeper")
    assert (group.handled, group.lag, group.expired, group.missed) == (2, 0, 3, 0)
    assert count_messages(bench.run).differences() == []
