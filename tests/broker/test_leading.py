"""A consumer process that also sequences, and the broker process that stands in for it."""

from __future__ import annotations

import signal
import threading
import uuid
from datetime import timedelta
from typing import Any

import pytest

from outbox import hooks
from outbox.broker import deaths
from outbox.broker.consumer import dispatcher
from outbox.broker.consumer.dispatcher import ConsumerSession
from outbox.broker.consumer.running_calls import LastCalls
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.leading import LeaderSettings, LeadingConsumer, Load
from outbox.broker.postgres import PostgresBroker
from outbox.broker.sequencer.leader_lease import LeaderLease
from outbox.broker.supervisor import ChildDeath
from outbox.message import Delivery, Message
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription
from tests.broker.bench import FIFO, ConsumptionBench, Seen, assert_each_once_in_order, encode, keyed
from tests.broker.leaders import STANDING_IN, leader, leading, led_by_consumer
from tests.broker.support import assert_gapless, end, half, process
from tests.round_trips import counted
from tests.support import eventually

# The time that others wait for a leader that does not renew its lease.
TERM_SECONDS = 1.0


@pytest.fixture(autouse=True)
def no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer processes of these tests have no parts, so the broker process in this process has none either."""
    monkeypatch.setattr(hooks, "leader_work", {})


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[ConsumerSession]:
    """The stays of this process's consumers, in the order in which they began."""
    found: list[ConsumerSession] = []
    connected = ConsumerSession._connected

    def connected_and_noted(self: ConsumerSession) -> Any:
        if self not in found:
            found.append(self)
        return connected(self)

    monkeypatch.setattr(ConsumerSession, "_connected", connected_and_noted)
    return found


def pauses(load: Load, *, messages: int, every: float, took: float, now: float) -> tuple[list[float], float]:
    """The pauses after 200 ticks of `took` seconds, one every `every` seconds, and the time at which they end."""
    found = []
    for _ in range(200):
        now += every
        found.append(load.pause_seconds(messages, now, took))
    return found, now


def test_a_leader_waits_for_more_decisions_only_under_load() -> None:
    load = Load()
    # Four threads that commit at the same moment, 300 times a second together.
    found, now = pauses(load, messages=4, every=4 / 300, took=0.002, now=1000.0)
    assert set(found) == {0.0}
    # 1,000 messages per second: three in the time of a tick.
    found, now = pauses(load, messages=10, every=0.01, took=0.003, now=now)
    assert found[-1] == pytest.approx(0.015), "five ticks"
    assert load.pause_seconds(1, now + 1.0, 0.003) == 0.0, "nothing was published for a second"


def test_the_lease_is_taken_from_a_process_that_stands_in(
    database: BrokerDatabase, connection: BrokerConnection
) -> None:
    first = LeaderLease("outbox", uuid.uuid4(), stands_in=True)
    second = LeaderLease("outbox", uuid.uuid4(), stands_in=True)
    leading = LeaderLease("outbox", uuid.uuid4())
    another = LeaderLease("outbox", uuid.uuid4())
    assert first.acquire_or_renew(connection) == 0.0
    assert second.acquire_or_renew(connection) > 0, "they are alike"
    assert leading.acquire_or_renew(connection) == 0.0, "it does not stand in"
    assert another.acquire_or_renew(connection) > 0, "they are alike"
    assert first.acquire_or_renew(connection) > 0, (
        "it gives up the lease at once: a tick under a lease that is lost would collide"
    )
    leading.release(connection)
    assert first.acquire_or_renew(connection) == 0.0


def test_a_consumer_that_leads_needs_no_broker_process(bench: ConsumptionBench) -> None:
    """Ready, delayed, transactional and retried messages, those that others send, and those of other consumers."""
    bench.declare("orders")
    bench.declare("elsewhere")
    seen, other = Seen(), Seen()

    def fails_first(delivery: Delivery) -> None:
        if delivery.attempt == 1 and delivery.body["n"] % 2:
            raise ValueError(f"the first attempt of {delivery.body}")
        seen(delivery)

    retry = RetryPolicy(delays_seconds=[0.1])
    with (
        bench.running(
            (Subscription(topic="orders", group="readers", retry=retry), fails_first), session_task=leading(bench)
        ),
        bench.running((Subscription(topic="elsewhere", group="others"), other)),
    ):
        bench.broker.send(keyed("orders", 20, 1) + keyed("elsewhere", 20, 1))
        bench.broker.send([Message(topic="orders", body=encode({"n": 20}), delay=timedelta(seconds=0.3))])
        transaction = half(Message(topic="orders", body=encode({"n": 21})))
        bench.broker.send_half(transaction)
        bench.broker.end([end(transaction.transaction_id)])
        eventually(lambda: sorted(seen.ns) == list(range(22)), what="its own")
        eventually(lambda: sorted(other.ns) == list(range(20)), what="those of another process")
        assert led_by_consumer(bench)
    assert leader(bench) is None, "released at its end"
    bench.assert_conserved("readers")


def test_a_message_costs_one_round_trip_from_commit_to_handler(
    bench: ConsumptionBench, sessions: list[ConsumerSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tick with the fetch and the announcement. Offsets are stored later, for all at once."""
    monkeypatch.setattr("outbox.broker.consumer.dispatcher.STORE_SECONDS", 3600.0)
    monkeypatch.setattr(dispatcher, "_LISTENING_POLL_SECONDS", 3600.0)
    bench.declare("orders")
    seen = Seen()
    settings = LeaderSettings(lease_term_seconds=3600.0, poll_seconds=3600.0)
    leading_task = LeadingConsumer(bench.database, settings=settings)
    with bench.running(
        (Subscription(topic="orders", group="readers"), seen), session_task=leading_task, lease_seconds=60.0
    ):
        for count in range(1, 9):
            # Then psycopg has prepared what is executed often, and all queues were looked at.
            bench.broker.send(keyed("orders", 1, 1))
            eventually(lambda count=count: len(seen.ns) == count)  # type: ignore[misc]
        [only] = sessions
        assert only._run is not None
        with counted(only._run.connection) as round_trips:
            for count in range(9, 19):
                bench.broker.send(keyed("orders", 1, 1))
                eventually(lambda count=count: len(seen.ns) == count)  # type: ignore[misc]
            assert round_trips() <= 10 + 10, "a look that found nothing new may come after each"


def test_the_broker_process_stands_in_and_releases_the_lease(bench: ConsumptionBench) -> None:
    bench.declare("orders")
    seen = Seen()
    subscription = Subscription(topic="orders", group="readers")
    with process(bench.database, STANDING_IN):
        eventually(lambda: leader(bench) is not None)
        with bench.running((subscription, seen)):
            bench.broker.send(keyed("orders", 5, 1))
            eventually(lambda: len(seen.ns) == 5)
            assert not led_by_consumer(bench)
        for stay in (2, 3):
            with bench.running((subscription, seen), session_task=leading(bench)):
                eventually(lambda: led_by_consumer(bench), within_seconds=5, what="it takes the lead at once")
                bench.broker.send(keyed("orders", 5, 1))
                eventually(lambda stay=stay: len(seen.ns) == 5 * stay)  # type: ignore[misc]
            eventually(lambda: leader(bench) is not None and not led_by_consumer(bench), within_seconds=5)
    assert_gapless(bench.connection)


def test_sequencing_that_fails_ends_no_consuming(bench: ConsumptionBench, caplog: pytest.LogCaptureFixture) -> None:
    bench.declare("orders")
    seen = Seen()
    bench.publish(keyed("orders", 1, 1))
    bench.connection.execute("ALTER TABLE outbox.tick RENAME TO tick_gone")
    with bench.running((Subscription(topic="orders", group="readers"), seen), session_task=leading(bench)):
        eventually(lambda: len(seen.ns) == 1)
        eventually(lambda: "sequencing in a consumer process is interrupted" in caplog.text)
        assert leader(bench) is None, "others may lead"
        bench.broker.send(keyed("orders", 1, 1))
        bench.connection.execute("ALTER TABLE outbox.tick_gone RENAME TO tick")
        eventually(lambda: len(seen.ns) == 2)


def test_without_listen_it_leaves_leading_to_the_process_that_stands_in(bench: ConsumptionBench) -> None:
    bench.declare("orders")
    bench.database = BrokerDatabase(conninfo=bench.url, listen_conninfo="")
    seen = Seen()
    with (
        process(bench.database, STANDING_IN),
        bench.running((Subscription(topic="orders", group="readers"), seen), session_task=leading(bench)),
    ):
        bench.broker.send(keyed("orders", 5, 1))
        eventually(lambda: len(seen.ns) == 5)
        assert not led_by_consumer(bench)


def test_no_process_waits_for_the_lease_of_a_dead_leader(
    database: BrokerDatabase, connection: BrokerConnection
) -> None:
    owner = uuid.uuid4()
    assert LeaderLease("outbox", owner, term_seconds=600).acquire_or_renew(connection) == 0.0
    left = LastCalls(instance=owner, told_to_stop=False, calls=[])
    deaths.record(database, ChildDeath(child="consumer-1", how="signal SIGKILL", hung=False, left_behind=left))
    assert LeaderLease("outbox", uuid.uuid4()).acquire_or_renew(connection) == 0.0


# -- real processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("sequencer.before_tick=kill@20", marks=pytest.mark.slow),
        "sequencer.mid_tick=kill@20",
        pytest.param("sequencer.after_tick=kill@20", marks=pytest.mark.slow),
        pytest.param("consumer.before_offset=kill@5", marks=pytest.mark.slow),
        "consumer.after_offset=kill@5",
    ],
)
def test_a_leading_consumer_killed_at_every_step(bench: ConsumptionBench, fault: str) -> None:
    bench.declare("orders", queues=6, types=FIFO)
    with process(bench.database, STANDING_IN):
        victim = bench.spawn("victim", mode="key_ordered", leads=True, term=TERM_SECONDS, faults=fault)
        publisher = threading.Thread(target=publish_slowly, args=(bench.broker,))
        publisher.start()
        assert victim.wait(60) == -signal.SIGKILL
        bench.spawn("heir", mode="key_ordered", leads=True, term=TERM_SECONDS)
        publisher.join(60)
        eventually(lambda: bench.effect_count() >= 400 and bench.lag("g") == 0, within_seconds=60)
    assert_each_once_in_order(bench.effects(), 400)
    assert_gapless(bench.connection)
    bench.assert_conserved("g")


def test_another_process_leads_for_a_frozen_leading_consumer_which_does_no_harm(bench: ConsumptionBench) -> None:
    bench.declare("orders", queues=6, types=FIFO)
    with process(bench.database, STANDING_IN):
        frozen = bench.spawn("frozen", mode="key_ordered", leads=True, term=TERM_SECONDS)
        eventually(lambda: led_by_consumer(bench))
        bench.spawn("beside", mode="key_ordered")
        publisher = threading.Thread(target=publish_slowly, args=(bench.broker,))
        publisher.start()
        for _ in range(2):
            eventually(lambda: led_by_consumer(bench))
            frozen.send_signal(signal.SIGSTOP)
            eventually(lambda: leader(bench) is not None and not led_by_consumer(bench), what="it is stood in for")
            frozen.send_signal(signal.SIGCONT)
        publisher.join(60)
        eventually(lambda: bench.effect_count() >= 400 and bench.lag("g") == 0, within_seconds=60)
    assert_each_once_in_order(bench.effects(), 400)
    assert_gapless(bench.connection)


def publish_slowly(broker: PostgresBroker) -> None:
    """400 messages of 20 keys, as a web application would: a few at a time, from one thread."""
    pause = threading.Event()
    for start in range(0, 400, 4):
        broker.send(keyed("orders", 4, 20, start=start))
        pause.wait(0.02)
