"""Handlers that run longer than their timeout."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from outbox.broker.operations import changes, dead_letters
from outbox.codec import Codecs, JsonCodec
from outbox.errors import HandlerTimedOut
from outbox.message import Delivery, Message
from outbox.retry import RetryPolicy
from outbox.subscription import Mode, OnError
from tests.broker.bench import ConsumptionBench, Seen, encode
from tests.broker.dispatch.test_failures import message, subscribe
from tests.broker.inbox import InboxInvoker
from tests.support import eventually


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders")
    return bench


def test_consume_timeout_sends_back_and_ignores_the_late_result(orders: ConsumptionBench) -> None:
    release = threading.Event()
    attempts: list[int] = []
    late: list[bool] = []

    def handle(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        if delivery.attempt == 1:
            late.append(release.wait(20))

    orders.publish([message()])
    subscription = subscribe(timeout_seconds=0.2, threads=1)
    with orders.sequencing(), orders.running((subscription, handle)):
        # One thread, stuck: the second attempt needs its replacement.
        eventually(lambda: attempts == [1, 2])
        release.set()
        eventually(lambda: late == [True])
    errors = orders.rows("SELECT error FROM outbox.failure")
    assert len(errors) == 1 and errors[0][0].startswith("HandlerTimedOut: the handler of group 'g' ran longer than")
    orders.assert_conserved("g")
    sent_back, handled = orders.rows("SELECT sum(sent_back), sum(handled) FROM outbox.offset_v1")[0]
    assert (sent_back, handled) == (1, 1)


def test_consume_timeout_in_an_ordered_mode_waits_for_the_stuck_call(orders: ConsumptionBench) -> None:
    """One at a time is stronger than the timeout: the attempt failed, but the next one begins after it returned."""
    running = Counter[str]()
    most: list[int] = []
    release = threading.Event()
    attempts: list[tuple[int, int]] = []

    def handle(delivery: Delivery) -> None:
        running["now"] += 1
        most.append(running["now"])
        attempts.append((delivery.body["n"], delivery.attempt))
        if delivery.attempt == 1 and delivery.body["n"] == 0:
            assert release.wait(20)
        running["now"] -= 1

    orders.publish([message(n, key="k") for n in range(3)])
    subscription = subscribe(mode=Mode.ORDERLY, timeout_seconds=2.0, suspend_seconds=0.05)
    with orders.running((subscription, handle)):
        eventually(lambda: orders.rows("SELECT 1 FROM outbox.failure"))
        release.set()
        eventually(lambda: len(attempts) == 4)
    assert attempts == [(0, 1), (0, 2), (1, 1), (2, 1)]
    assert max(most) == 1


def test_timeout_can_be_mapped_to_a_reaction(orders: ConsumptionBench) -> None:
    release = threading.Event()
    orders.publish([message()])
    subscription = subscribe(timeout_seconds=0.1, on_error={HandlerTimedOut: OnError.DEAD_LETTER})
    with orders.running((subscription, lambda delivery: release.wait(20))):
        eventually(lambda: dead_letters.list_dead_letters(orders.run))
        release.set()


_SLOW_COMMIT = """
CREATE TABLE slow (n integer);
CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER hang AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION hang();
"""


@pytest.mark.parametrize("mode", [Mode.CONCURRENT, Mode.ORDERLY])
def test_a_timeout_during_commit_is_no_failed_attempt(
    orders: ConsumptionBench, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    """The transaction may commit. If this were the last attempt, a handled message would be a dead letter."""
    orders.connection.execute(_SLOW_COMMIT)
    orders.connection.execute("SELECT pg_advisory_lock(7)")
    invoker = InboxInvoker(orders.url, idle_seconds=30)
    attempts: list[int] = []

    def handle(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        invoker.connection.execute("INSERT INTO slow VALUES (1)")

    orders.publish([message()])
    policy = RetryPolicy(delays_seconds=[0.1], max_attempts=1)
    subscription = subscribe(mode=mode, timeout_seconds=0.3, retry=policy, max_suspends=0, threads=2)
    with orders.sequencing(), orders.running((subscription, handle), invoker=invoker, lease_seconds=10.0):
        eventually(lambda: "ran longer than" in caplog.text)
        orders.connection.execute("SELECT pg_advisory_unlock(7)")
        eventually(lambda: orders.lag("g") == 0)
    assert orders.rows("SELECT count(*) FROM slow") == [(1,)]
    assert attempts == [1]
    assert dead_letters.list_dead_letters(orders.run) == []
    orders.assert_conserved("g")
    invoker.close()


def test_a_codec_that_hangs_stops_only_its_own_messages(orders: ConsumptionBench) -> None:
    """Otherwise the messages of all groups time out, and become dead letters that no handler has seen."""
    began, release = threading.Event(), threading.Event()

    class Hanging(JsonCodec):
        content_type = "application/x-hanging"

        def decode(self, data: bytes) -> object:
            began.set()
            release.wait(20)
            return super().decode(data)

    codecs = Codecs()
    codecs.add(Hanging())
    orders.declare("mails")
    seen, mails = Seen(), Seen()
    with (
        orders.sequencing(),
        orders.running(
            (subscribe(timeout_seconds=60), seen),
            (subscribe(group="mailer", topic="mails", timeout_seconds=0.5), mails),
            codecs=codecs,
        ),
    ):
        orders.publish([message(content_type="application/x-hanging")])
        assert began.wait(20)
        orders.publish([Message(topic="mails", body=encode({"n": n})) for n in range(2)])
        eventually(lambda: sorted(mails.ns) == [0, 1])
        release.set()
        eventually(lambda: seen.ns == [0])
    assert orders.rows("SELECT error FROM outbox.failure") == []


def test_a_message_that_hung_while_its_queue_was_stopped_is_handled_once(bench: ConsumptionBench) -> None:
    """The process fetches it again after the stop, and must not also try it from memory."""
    bench.declare("orders", queues=1)
    release = threading.Event()
    calls: list[tuple[str, int]] = []

    def handle(delivery: Delivery) -> None:
        calls.append((delivery.key, delivery.body["n"]))
        if calls == [("hangs", 0)]:
            assert release.wait(20)
        elif delivery.key == "stops" and calls.count(("stops", 0)) == 1:
            raise LookupError

    bench.publish([message(key="hangs"), message(1, key="hangs")])
    subscription = subscribe(
        mode=Mode.KEY_ORDERED,
        threads=2,
        timeout_seconds=3.0,
        suspend_seconds=0.05,
        on_error={LookupError: OnError.STOP},
    )
    with bench.running((subscription, handle)):
        eventually(lambda: bench.rows("SELECT 1 FROM outbox.failure"))
        bench.publish([message(key="stops")])
        eventually(lambda: bench.rows("SELECT 1 FROM outbox.queue_lease WHERE stopped IS NOT NULL"))
        changes.resume(bench.run, "g")
        eventually(lambda: calls.count(("stops", 0)) == 2)
        release.set()
        eventually(lambda: bench.lag("g") == 0)
    assert sorted(calls) == [("hangs", 0)] * 2 + [("hangs", 1)] + [("stops", 0)] * 2
    bench.assert_conserved("g")
