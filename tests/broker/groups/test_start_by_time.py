"""Rewinding to a time goes by when consumers could first see a message."""

from __future__ import annotations

from datetime import datetime, timedelta

from outbox.broker.log.consume_queue import starting_offsets
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.operations.changes import reset
from outbox.message import Message
from outbox.subscription import Start, Subscription
from tests.broker.bench import ConsumptionBench


def _now(bench: ConsumptionBench) -> datetime:
    return bench.rows("SELECT clock_timestamp()")[0][0]  # type: ignore[no-any-return]


def _start(bench: ConsumptionBench, time: datetime | Start) -> int:
    topic_id = TopicCatalog("outbox").get(bench.connection, "single").topic_id
    [offset] = starting_offsets(bench.run, topic_id, time).values()
    return offset


def test_a_delayed_message_is_rewound_to_by_when_it_was_due(bench: ConsumptionBench) -> None:
    bench.declare("single", queues=1)
    seen: list[int] = []
    subscription = Subscription(group="g", topic="single")
    delayed = Message(topic="single", body=b'{"n":9}', delay=timedelta(hours=1))
    bench.publish([delayed, *(Message(topic="single", body=b'{"n":%d}' % n) for n in range(3))])
    between = _now(bench)
    bench.connection.execute("UPDATE outbox.scheduled SET due_at = now()")
    bench.sequence()
    bench.run_until_idle(subscription, lambda delivery: seen.append(delivery.body["n"]))
    assert sorted(seen) == [0, 1, 2, 9]
    seen.clear()
    [move] = reset(bench.run, "g", "single", between)
    assert (move.from_offset, move.to_offset) == (4, 3)
    bench.run_until_idle(subscription, lambda delivery: seen.append(delivery.body["n"]))
    assert seen == [9]


def test_every_time_leads_to_the_first_entry_queued_then_or_later(bench: ConsumptionBench) -> None:
    bench.declare("single", queues=1)
    bench.publish([Message(topic="single", body=b"{}") for _ in range(40)])
    # Four at a time, a minute apart; later the first ten are removed.
    noon = datetime.fromisoformat("2026-03-01T12:00:00+00:00")
    bench.connection.execute(
        "UPDATE outbox.consume_queue SET queued_at = %(noon)s + queue_offset / 4 * interval '1 minute'", {"noon": noon}
    )
    assert [_start(bench, noon + timedelta(minutes=minute)) for minute in range(-1, 12)] == [
        0, 0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 40,
    ]  # fmt: skip
    bench.connection.execute("DELETE FROM outbox.consume_queue WHERE queue_offset < 10")
    bench.connection.execute("UPDATE outbox.queue SET floor = 10")
    assert [_start(bench, noon + timedelta(minutes=minute)) for minute in (0, 2, 3)] == [10, 10, 12]
    assert (_start(bench, Start.EARLIEST), _start(bench, Start.LATEST)) == (10, 40)
