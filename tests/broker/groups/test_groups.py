"""Groups: registration, where they start, pause and resume, resets, filters in the broker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from outbox.broker.consumer import runtime as consuming
from outbox.broker.database.executor import Executor
from outbox.broker.groups import registration
from outbox.broker.log import failing
from outbox.broker.log.consume_queue import starting_offsets
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.operations import changes, progress
from outbox.errors import (
    InconsistentSubscription,
    InvalidFilter,
    InvalidSubscription,
    UnknownGroup,
    UnknownTopic,
    UsageError,
)
from outbox.message import Delivery, Message
from outbox.retry import RetryPolicy
from outbox.subscription import Mode, Start, Subscription
from outbox.utils import heartbeat
from tests.broker.bench import ConsumptionBench, Seen, encode
from tests.broker.inbox import InboxInvoker
from tests.support import eventually


def message(n: int, **fields: Any) -> Message:
    return Message(**{"topic": "orders", "body": encode({"n": n}), "key": str(n), **fields})


def messages(start: int, end: int, **fields: Any) -> list[Message]:
    return [message(n, **fields) for n in range(start, end)]


def subscribe(**options: Any) -> Subscription:
    return Subscription(**{"group": "g", "topic": "orders", **options})


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders")
    return bench


# -- registration -----------------------------------------------------------------------------------


def test_register_by_many_at_once(orders: ConsumptionBench) -> None:
    found: list[registration.Registration] = []

    def register() -> None:
        with orders.database.connect() as connection:
            found.append(registration.register(Executor(connection, "outbox"), subscribe()))

    threads = [threading.Thread(target=register) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len(set(found)) == 1


def test_unknown_topic_and_invalid_filter_are_refused(orders: ConsumptionBench) -> None:
    with pytest.raises(UnknownTopic, match="Did you mean 'orders'"):
        orders.runtime((subscribe(topic="order"), Seen())).run_once()
    with pytest.raises(InvalidFilter, match="column 8"):
        orders.runtime((subscribe(filter="sql: a ? 1"), Seen()))


@pytest.mark.parametrize(
    "other", [subscribe(filter="paid"), subscribe(mode=Mode.ORDERLY)], ids=["another filter", "another mode"]
)
def test_contradictory_subscription_of_a_live_group_is_refused(orders: ConsumptionBench, other: Subscription) -> None:
    with orders.running((subscribe(), Seen())):
        eventually(lambda: orders.members() == 1)
        with pytest.raises(InconsistentSubscription, match=r"consumes 'orders' with mode='concurrent' .* \(pid \d+\)"):
            orders.runtime((other, Seen())).run_once()
    # Once the others are gone, a new definition is a deployment.
    orders.runtime((other, Seen())).run_once()


def test_a_rolling_deployment_of_another_mode_ends(
    orders: ConsumptionBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new consumer waits and is ready while an old one lives. The old ones handle the messages meanwhile."""
    old = [orders.spawn(name) for name in ("old-1", "old-2")]
    eventually(lambda: orders.members() == 2)
    beats = tmp_path / "heartbeat"
    monkeypatch.setenv(heartbeat.VARIABLE, str(beats))
    new = Seen()
    with orders.running((subscribe(mode=Mode.ORDERLY), new)):
        eventually(lambda: "consuming waits for the end of other processes" in caplog.text)
        eventually(lambda: heartbeat.listen(beats).is_ready)
        orders.publish(messages(0, 20))
        orders.stop(old[0])
        orders.publish(messages(20, 40))
        eventually(lambda: orders.effect_count() == 40)
        assert orders.rows("SELECT mode FROM outbox.subscription") == [("concurrent",)]
        orders.stop(old[1])
        orders.publish(messages(40, 60))
        eventually(lambda: len(new.ns) == 20)
        assert orders.rows("SELECT mode FROM outbox.subscription") == [("orderly",)]
    assert (orders.effect_count(), new.take()) == (40, list(range(40, 60)))
    orders.assert_conserved("g")


def test_a_consumer_that_waits_for_others_for_long_is_named(
    orders: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consuming, "INCONSISTENT_SECONDS", 0.0)
    with orders.running((subscribe(), Seen())):
        eventually(lambda: orders.members() == 1)
        with orders.running((subscribe(filter="paid"), Seen())):
            [one] = eventually(lambda: failing.failing(orders.run))
    assert (one.part, one.of) == (failing.ProcessPart.CONSUMING, "g")
    assert "all instances of a group need the same mode and filter" in one.error


def test_a_group_is_broadcast_or_not_for_good(orders: ConsumptionBench) -> None:
    orders.runtime((subscribe(), Seen())).run_once()
    with pytest.raises(InvalidSubscription, match="broadcast=False"):
        orders.runtime((subscribe(broadcast=True), Seen())).run_once()
    with pytest.raises(InvalidSubscription, match="twice"):
        orders.runtime((subscribe(), Seen()), (subscribe(), Seen()))


# -- where a new group starts -----------------------------------------------------------------------


def test_new_group_from_earliest_latest_and_time(orders: ConsumptionBench) -> None:
    orders.publish(messages(0, 10))
    between = orders.rows("SELECT clock_timestamp()")[0][0]
    orders.publish(messages(10, 20))
    starts: dict[str, Start | datetime] = {"earliest": Start.EARLIEST, "latest": Start.LATEST, "time": between}
    seen = {name: Seen() for name in starts}
    runtimes = [orders.runtime((subscribe(group=name, start=start), seen[name])) for name, start in starts.items()]
    for runtime in runtimes:
        runtime.run_once()
    assert [seen[name].take() for name in starts] == [list(range(20)), [], list(range(10, 20))]
    orders.publish(messages(20, 30))
    for runtime in runtimes:
        runtime.run_once()
    assert [seen[name].take() for name in starts] == [list(range(20, 30))] * 3
    for name in starts:
        orders.assert_conserved(name)


def test_new_queues_of_a_known_topic_start_at_their_first_message(orders: ConsumptionBench) -> None:
    seen = Seen()
    orders.publish(messages(0, 10))
    runtime = orders.runtime((subscribe(start=Start.LATEST), seen))
    runtime.run_once()
    orders.declare("orders", queues=6)
    orders.publish(messages(10, 40))
    for _ in range(3):
        runtime.run_once()
        orders.sequence()
    assert seen.take() == list(range(10, 40))


def test_drain_then_switch_to_new_queues(orders: ConsumptionBench) -> None:
    """No message of the new queues is handled before the old ones are consumed, so that keys keep their order."""
    order: list[int] = []
    orders.publish(messages(0, 40, key="k"))
    orders.declare("orders", queues=3)
    orders.publish(messages(40, 60, key="k"))
    for _ in range(4):
        orders.runtime((subscribe(mode=Mode.ORDERLY), lambda delivery: order.append(delivery.body["n"]))).run_once()
        orders.sequence()
    assert order == list(range(60))


# -- operating --------------------------------------------------------------------------------------


def test_pause_and_resume(orders: ConsumptionBench) -> None:
    seen = Seen()
    with orders.sequencing(), orders.running((subscribe(), seen)):
        orders.broker.send(messages(0, 5))
        eventually(lambda: len(seen.ns) == 5)
        changes.pause(orders.run, "g")
        eventually(lambda: orders.rows("SELECT paused FROM outbox.consumer_group") == [(True,)])
        settled = threading.Event()
        # Pausing is seen within a look of the coordinator; then nothing starts any more.
        settled.wait(0.8)
        orders.broker.send(messages(5, 10))
        eventually(lambda: orders.lag("g") == 5)
        settled.wait(0.3)
        assert len(seen.ns) == 5
        changes.resume(orders.run, "g")
        eventually(lambda: len(seen.ns) == 10)


def test_unknown_group_is_named(orders: ConsumptionBench) -> None:
    operations: list[Callable[[], object]] = [
        lambda: changes.pause(orders.run, "nobody"),
        lambda: changes.resume(orders.run, "nobody"),
        lambda: changes.reset(orders.run, "nobody", "orders", Start.EARLIEST),
    ]
    for operation in operations:
        with pytest.raises(UnknownGroup, match="'nobody'"):
            operation()


def test_offset_reset_by_time_offset_and_end(orders: ConsumptionBench) -> None:
    orders.declare("single", queues=1)
    seen = Seen()
    runtime = orders.runtime((subscribe(topic="single"), seen))
    orders.publish(messages(0, 10, topic="single"))
    between = orders.rows("SELECT clock_timestamp()")[0][0]
    orders.publish(messages(10, 20, topic="single"))

    def after_reset(target: Start | datetime | int) -> list[int]:
        changes.reset(orders.run, "g", "single", target)
        runtime.run_once()
        return seen.take()

    runtime.run_once()
    seen.take()
    assert after_reset(Start.EARLIEST) == list(range(20))
    assert after_reset(between) == list(range(10, 20))
    assert after_reset(17) == [17, 18, 19]
    assert after_reset(9_999) == []
    changes.reset(orders.run, "g", "single", 0)
    assert after_reset(Start.LATEST) == []
    orders.assert_conserved("g")
    with pytest.raises(UsageError, match="does not consume"):
        changes.reset(orders.run, "g", "orders", 0)


def test_reset_dry_run_lists_the_queues_that_would_move(orders: ConsumptionBench) -> None:
    seen = Seen()
    runtime = orders.runtime((subscribe(), seen))
    orders.publish(messages(0, 40))
    runtime.run_once()
    before = progress.list_queues(orders.run, "g")
    planned = changes.reset(orders.run, "g", "orders", Start.EARLIEST, dry_run=True)
    assert progress.list_queues(orders.run, "g") == before
    assert sum(move.from_offset - move.to_offset for move in planned) == 40
    done = changes.reset(orders.run, "g", "orders", Start.EARLIEST)
    assert done == planned
    assert orders.lag("g") == 40


def test_reset_while_it_runs_fences_the_owner(orders: ConsumptionBench) -> None:
    seen = Seen()
    with orders.running((subscribe(), seen)):
        orders.publish(messages(0, 30))
        eventually(lambda: len(seen.ns) == 30 and orders.lag("g") == 0)
        changes.reset(orders.run, "g", "orders", Start.EARLIEST)
        eventually(lambda: len(seen.ns) == 60)
        eventually(lambda: orders.lag("g") == 0)
    orders.assert_conserved("g")


def test_reprocess_raises_the_generation_of_the_inbox(orders: ConsumptionBench) -> None:
    invoker = InboxInvoker(orders.url)
    seen = Seen()
    runtime = orders.runtime((subscribe(), seen), invoker=invoker)
    orders.publish(messages(0, 5))
    runtime.run_once()
    changes.reset(orders.run, "g", "orders", Start.EARLIEST)
    assert runtime.run_once().skipped == 5
    assert seen.take() == list(range(5))
    changes.reset(orders.run, "g", "orders", Start.EARLIEST, reprocess=True)
    assert runtime.run_once().handled == 5
    assert seen.take() == list(range(5))
    invoker.close()


def test_a_generation_after_a_restore_is_new(orders: ConsumptionBench) -> None:
    """A restore takes resets away. The inbox has rows of their generations, which no later reset may meet."""
    orders.runtime((subscribe(), Seen())).run_once()
    raised = changes.raise_generation(orders.run, "g")
    orders.connection.execute("UPDATE outbox.consumer_group SET generation = 1")
    # The number contains the second.
    eventually(lambda: changes.raise_generation(orders.run, "g") > raised)
    assert changes.raise_generation(orders.run, "g") > raised + 1


def test_retention_overtaking_a_group_is_counted_as_expired(orders: ConsumptionBench) -> None:
    orders.declare("single", queues=1)
    seen = Seen()
    runtime = orders.runtime((subscribe(topic="single"), seen))
    runtime.run_once()
    orders.publish(messages(0, 10, topic="single"))
    orders.connection.execute(
        "DELETE FROM outbox.consume_queue WHERE queue_offset < 4 AND queue_id ="
        " (SELECT queue_id FROM outbox.queue JOIN outbox.topic USING (topic_id) WHERE name = 'single')"
    )
    orders.connection.execute(
        "UPDATE outbox.queue SET floor = 4 WHERE topic_id = (SELECT topic_id FROM outbox.topic WHERE name = 'single')"
    )
    runtime.run_once()
    assert seen.take() == list(range(4, 10))
    assert orders.rows("SELECT expired, handled FROM outbox.offset_v1 WHERE topic = 'single'") == [(4, 6)]
    orders.assert_conserved("g")


# -- broadcast groups: every instance gets every message --


def test_broadcast_gives_every_instance_all_messages(orders: ConsumptionBench) -> None:
    one, two = Seen(), Seen()
    subscription = subscribe(broadcast=True, start=Start.LATEST)
    orders.publish(messages(0, 5))
    with orders.sequencing(), orders.running((subscription, one)), orders.running((subscription, two)):
        eventually(lambda: orders.members() == 2)
        # Both have taken their position by the time their first message arrives.
        eventually(lambda: orders.broker.send([message(-1)]) and -1 in one.ns and -1 in two.ns)
        orders.broker.send(messages(5, 20))
        eventually(lambda: sorted({*one.ns}) == sorted({*two.ns}) == [-1, *range(5, 20)])


def test_broadcast_retries_in_place_and_gives_up(orders: ConsumptionBench) -> None:
    attempts: list[int] = []
    done = Seen()

    def handle(delivery: Delivery) -> None:
        if delivery.body["n"] == 1:
            attempts.append(delivery.attempt)
            raise ValueError
        done(delivery)

    policy = RetryPolicy(delays_seconds=[0.01], max_attempts=3)
    orders.publish(messages(0, 3))
    with orders.running((subscribe(broadcast=True, retry=policy), handle)):
        eventually(lambda: len(attempts) == 3 and sorted(done.ns) == [0, 2])
    assert attempts == [1, 2, 3]
    assert orders.retrying() == 0


# -- rewinding to a time goes by when consumers could first see a message --


def _start(bench: ConsumptionBench, time: datetime | Start) -> int:
    topic_id = TopicCatalog("outbox").get(bench.connection, "single").topic_id
    [offset] = starting_offsets(bench.run, topic_id, time).values()
    return offset


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
