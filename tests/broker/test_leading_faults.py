"""Faults in a consumer process that also sequences: another process leads meanwhile, and consuming continues."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from outbox.broker.consumer import dispatcher
from outbox.broker.consumer.dispatcher import Dispatcher
from outbox.broker.database import timeouts
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Channel, notify
from outbox.broker.leading import LeaderSettings, LeadingConsumer, Sequencer, TickCounts
from outbox.broker.operations import summary
from outbox.message import Delivery
from outbox.retry import RetryPolicy
from outbox.subscription import Subscription
from tests.broker.bench import ConsumptionBench, Seen, keyed
from tests.broker.leaders import STANDING_IN, leader, leading, led_by_consumer
from tests.broker.support import process
from tests.support import eventually


def test_what_is_decided_while_it_ticks_is_ticked_next(
    bench: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if this process consumes no message of the tick; no other process would wake it."""
    monkeypatch.setattr(dispatcher, "_LISTENING_POLL_SECONDS", 3600.0)
    bench.declare("orders")
    bench.declare("elsewhere")
    run_once, appended = Sequencer.run_once, []

    def run_once_meanwhile(self: Sequencer, connection: BrokerConnection, after: Any = None) -> TickCounts:
        counts = run_once(self, connection, after)
        if counts.appended:
            appended.append(counts.appended)
            if len(appended) < 20:
                bench.broker.send(keyed("elsewhere", 1, 1))
                notify(bench.run, Channel.DECIDED)
        return counts

    monkeypatch.setattr(Sequencer, "run_once", run_once_meanwhile)
    settings = LeaderSettings(lease_term_seconds=3600.0, poll_seconds=3600.0)
    leading_task = LeadingConsumer(bench.database, settings=settings)
    with bench.running(
        (Subscription(topic="orders", group="readers"), Seen()), session_task=leading_task, lease_seconds=60
    ):
        eventually(lambda: led_by_consumer(bench))
        bench.broker.send(keyed("elsewhere", 1, 1))
        eventually(lambda: len(appended) >= 20)


@pytest.mark.slow
def test_a_process_that_cannot_consume_does_not_lead(
    bench: ConsumptionBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it pauses between its attempts, no group of the broker would get messages."""
    bench.declare("orders")
    step = Dispatcher.step

    def failing(self: Dispatcher, run: Executor, grown: Any) -> None:
        step(self, run, grown)
        if steps.is_set():
            run.connection.execute("SELECT 1 / 0")

    steps = threading.Event()
    monkeypatch.setattr(Dispatcher, "step", failing)
    with (
        process(bench.database, STANDING_IN),
        bench.running((Subscription(topic="orders", group="readers"), Seen()), session_task=leading(bench)),
    ):
        eventually(lambda: led_by_consumer(bench))
        steps.set()
        eventually(lambda: "consuming is interrupted" in caplog.text)
        eventually(lambda: leader(bench) is not None and not led_by_consumer(bench), within_seconds=5)
        for number in range(3):
            failures = caplog.text.count("consuming is interrupted")
            eventually(lambda failures=failures: caplog.text.count("consuming is interrupted") > failures)  # type: ignore[misc]
            assert not led_by_consumer(bench), number
        steps.clear()
        eventually(lambda: led_by_consumer(bench))


def test_a_rollback_of_the_consumer_takes_no_plan_of_the_tick(
    bench: ConsumptionBench, caplog: pytest.LogCaptureFixture
) -> None:
    """psycopg takes back all prepared statements with a transaction that failed."""
    bench.declare("orders")
    came: list[int] = []

    def handle(delivery: Delivery) -> None:
        if delivery.body["n"] == 1 and delivery.attempt == 1:
            raise ValueError("the first attempt")
        came.append(delivery.body["n"])

    subscription = Subscription(topic="orders", group="readers", retry=RetryPolicy(delays_seconds=[0.1]))
    bench.connection.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no retry queue now'; END $$"
    )
    with bench.running((subscription, handle), session_task=leading(bench)):
        bench.broker.send(keyed("orders", 1, 1))
        eventually(lambda: came == [0])
        bench.connection.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON outbox.queue FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
        bench.broker.send(keyed("orders", 1, 1, start=1))
        eventually(lambda: "could not be sent back" in caplog.text)
        bench.broker.send(keyed("orders", 1, 1, start=2))
        eventually(lambda: 2 in came)
        bench.connection.execute("DROP FUNCTION refuse CASCADE")
        eventually(lambda: sorted(came) == [0, 1, 2])
    assert "sequencing in a consumer process is interrupted" not in caplog.text


@pytest.mark.slow
def test_ticks_that_break_the_connection_end_no_consuming(
    bench: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.declare("orders")
    seen = Seen()
    run_once = Sequencer.run_once

    def breaking(self: Sequencer, connection: BrokerConnection, after: Any = None) -> TickCounts:
        if connection.info.parameter_status("application_name") == "outbox-consumer":
            connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        return run_once(self, connection, after)

    monkeypatch.setattr(Sequencer, "run_once", breaking)
    with (
        process(bench.database, STANDING_IN),
        bench.running((Subscription(topic="orders", group="readers"), seen), session_task=leading(bench)),
    ):
        for count in (5, 10, 15):
            bench.broker.send(keyed("orders", 5, 1))
            eventually(lambda count=count: len(seen.ns) == count)  # type: ignore[misc]


def test_it_rests_longer_and_longer(bench: ConsumptionBench, caplog: pytest.LogCaptureFixture) -> None:
    bench.declare("orders")
    bench.connection.execute("ALTER TABLE outbox.leader_lease RENAME TO gone")
    with bench.running((Subscription(topic="orders", group="readers"), Seen()), session_task=leading(bench)):
        eventually(lambda: "trying again in 1.0 s" in caplog.text and "trying again in 2.0 s" in caplog.text)
        bench.connection.execute("ALTER TABLE outbox.gone RENAME TO leader_lease")
        eventually(lambda: led_by_consumer(bench))


def test_a_process_that_stands_in_waits_for_no_background_pass(
    bench: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have to lead again at once."""
    counted_to_the_end = threading.Event()
    monkeypatch.setattr(summary, "run_once", lambda _: float(counted_to_the_end.wait(60)))
    bench.declare("orders")
    with process(bench.database, STANDING_IN):
        eventually(lambda: leader(bench) is not None)
        with bench.running((Subscription(topic="orders", group="readers"), Seen()), session_task=leading(bench)):
            eventually(lambda: led_by_consumer(bench))
        eventually(lambda: leader(bench) is not None, within_seconds=3, what="it waits 5 s for its threads otherwise")
        counted_to_the_end.set()


@pytest.mark.parametrize("leads", [False, True])
def test_a_consumer_that_waits_for_a_locked_table_says_so_and_continues(
    bench: ConsumptionBench, leads: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "_LIMIT_SESSION", "SET lock_timeout = '1s'")
    bench.declare("orders")
    seen = Seen()
    session_task = leading(bench) if leads else None
    with bench.running((Subscription(topic="orders", group="readers"), seen), session_task=session_task):
        eventually(lambda: not leads or led_by_consumer(bench))
        bench.publish(keyed("orders", 1, 1))
        eventually(lambda: seen.ns == [0])
        with psycopg.connect(bench.url) as locking:
            locking.execute("LOCK TABLE outbox.consumer_offset IN ACCESS EXCLUSIVE MODE")
            bench.publish(keyed("orders", 1, 1, start=1))
            eventually(lambda: "consuming is interrupted" in caplog.text, within_seconds=15)
        bench.publish(keyed("orders", 1, 1, start=2))
        eventually(lambda: 2 in seen.ns and bench.lag("readers") == 0)


# Without LISTEN, each transaction has its own limit, which this test does not shorten.
@pytest.mark.parametrize("listen", [pytest.param("", marks=pytest.mark.slow), None])
def test_a_broker_process_that_waits_for_a_locked_table_says_so_and_continues(
    bench: ConsumptionBench, listen: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timeouts, "_LIMIT_SESSION", "SET lock_timeout = '1s'")
    bench.declare("orders")
    with process(BrokerDatabase(bench.url, listen_conninfo=listen)):
        eventually(lambda: leader(bench))
        with psycopg.connect(bench.url) as locking:
            locking.execute("LOCK TABLE outbox.tick IN ACCESS EXCLUSIVE MODE")
            bench.broker.send(keyed("orders", 1, 1))
            eventually(lambda: "sequencing is interrupted" in caplog.text, within_seconds=15)
        eventually(lambda: bench.rows("SELECT count(*) FROM outbox.consume_queue") == [(1,)])


def test_what_is_no_list_of_queues_names_none(bench: ConsumptionBench) -> None:
    """Every role that may connect may notify."""
    bench.declare("orders")
    seen = Seen()
    with bench.running((Subscription(topic="orders", group="readers"), seen)) as thread:
        bench.publish(keyed("orders", 1, 1))
        eventually(lambda: seen.ns == [0])
        for payload in ("9" * 5000, "x", "1 x", "-1", " "):
            bench.connection.execute("SELECT pg_notify('outbox_queued', %s)", [payload])
        bench.publish(keyed("orders", 1, 1, start=1))
        eventually(lambda: seen.ns == [0, 1])
        assert thread.is_alive()
