"""The time limit of a message: no attempt begins after it, and each message is counted once (decision 207)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from outbox.broker.maintenance import retention
from outbox.broker.operations import audit, changes, dead_letters, summary
from outbox.broker.operations.trace import EntryState, trace
from outbox.errors import InvalidMessage, PermanentError
from outbox.message import Delivery, Message
from outbox.retry import RetryPolicy
from outbox.subscription import Effects, Mode, Start, Subscription
from outbox.time_limit import TIMEOUT_HEADER
from outbox.topic import MessageType
from outbox.transaction import Decision, EndTransaction, HalfTransaction
from outbox.utils.ids import uuid7
from tests.broker.bench import AT_ONCE, FIFO, ConsumptionBench, Seen, encode
from tests.support import eventually

LATER = RetryPolicy(delays_seconds=[3600], max_attempts=5)


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders", queues=1)
    return bench


def subscribe(**options: Any) -> Subscription:
    return Subscription(**{"group": "g", "topic": "orders", "retry": AT_ONCE, **options})


def message(n: int = 0, timeout: str = "60", **fields: Any) -> Message:
    headers = {TIMEOUT_HEADER: timeout} if timeout else {}
    return Message(**{"topic": "orders", "body": encode({"n": n}), "headers": headers, **fields})


def each(handler: Seen) -> Any:
    """A handler of batches, too."""

    def handle(given: Any) -> None:
        for delivery in [given] if isinstance(given, Delivery) else given:
            handler(delivery)

    return handle


def let_limits_end(bench: ConsumptionBench, seconds: float = 3600) -> None:
    """Make all stored messages older, as if this time had passed."""
    bench.connection.execute(
        "UPDATE outbox.commit_log SET stored_at = stored_at - make_interval(secs => %s),"
        " deliver_at = deliver_at - make_interval(secs => %s)",
        (seconds, seconds),
    )


def timed_out(bench: ConsumptionBench) -> list[int]:
    rows = bench.rows(
        "SELECT convert_from(body, 'UTF8')::json ->> 'n' FROM outbox.timed_out JOIN outbox.commit_log USING (log_id)"
        " ORDER BY timed_out.log_id, queue_id"
    )
    return [int(n) for (n,) in rows]


def assert_counted(bench: ConsumptionBench, expected: int, group: str = "g") -> None:
    counted = audit.count_messages(bench.run)
    assert counted.differences() == []
    assert counted.groups[group].timed_out == expected
    bench.assert_conserved(group)


@pytest.mark.parametrize(("mode", "batch"), [(Mode.CONCURRENT, 1), (Mode.ORDERLY, 10), (Mode.KEY_ORDERED, 1)])
def test_no_handler_gets_a_message_after_its_limit(bench: ConsumptionBench, mode: Mode, batch: int) -> None:
    bench.declare("orders", queues=1, types=FIFO)
    seen = Seen()
    # The process loads large bodies late.
    large = {"body": encode({"n": 1, "fill": "x" * 40_000})}
    limited = [message(n, "60" if n % 2 else "", key=f"k{n % 3}", **(large if n == 1 else {})) for n in range(20)]
    bench.publish(limited)
    let_limits_end(bench)
    bench.publish([message(n, key=f"k{n % 3}") for n in range(20, 24)])
    passes = bench.run_until_idle(subscribe(mode=mode, batch=batch), each(seen))
    assert seen.take() == [*range(0, 20, 2), 20, 21, 22, 23]
    assert timed_out(bench) == [*range(1, 20, 2)]
    assert sum(one.timed_out for one in passes) == 10
    assert sum(one.failed for one in passes) == 0
    assert bench.lag("g") == 0
    assert_counted(bench, 10)


def test_every_group_decides_for_itself(orders: ConsumptionBench) -> None:
    seen = Seen()
    orders.publish([message(1)])
    orders.run_until_idle(subscribe(), seen)
    let_limits_end(orders)
    orders.run_until_idle(subscribe(group="late"), seen)
    assert seen.take() == [1]
    assert_counted(orders, 0)
    assert_counted(orders, 1, "late")


def test_a_message_that_waits_in_memory_is_looked_at_again(orders: ConsumptionBench) -> None:
    """The process fetches both messages before the limit of the second one ends."""
    first_runs, go_on = threading.Event(), threading.Event()
    seen: list[int] = []

    def handle(delivery: Delivery) -> None:
        seen.append(delivery.body["n"])
        first_runs.set()
        assert go_on.wait(20)

    orders.publish([message(1, ""), message(2, "1")])
    with orders.running((subscribe(threads=1), handle)):
        assert first_runs.wait(20)
        eventually(
            lambda: orders.rows("SELECT FROM outbox.commit_log WHERE stored_at < clock_timestamp() - interval '1.1 s'"),
            what="the end of the limit",
        )
        go_on.set()
        eventually(lambda: timed_out(orders) == [2])
        eventually(lambda: orders.lag("g") == 0)
    assert seen == [1]
    assert_counted(orders, 1)


def test_a_retry_after_the_limit_is_timed_out_and_not_tried(orders: ConsumptionBench) -> None:
    tries: list[int] = []

    def fail(delivery: Delivery) -> None:
        tries.append(delivery.attempt)
        raise ValueError("not now")

    orders.publish([message(1)])
    runtime = orders.runtime((subscribe(retry=LATER), fail))
    runtime.run_once()
    [(wait,)] = orders.rows("SELECT extract(epoch FROM due_at - clock_timestamp()) FROM outbox.scheduled")
    assert 0 < wait <= 60, "no retry waits longer than the limit"
    let_limits_end(orders)
    orders.connection.execute("UPDATE outbox.scheduled SET due_at = now()")
    orders.sequence()
    runtime.run_once()
    assert tries == [1]
    assert timed_out(orders) == [1]
    assert dead_letters.list_dead_letters(orders.run, "g") == []
    assert_counted(orders, 1)


def test_a_permanent_error_before_the_limit_makes_a_dead_letter(orders: ConsumptionBench) -> None:
    def fail(delivery: Delivery) -> None:
        let_limits_end(orders)
        raise PermanentError("broken")

    orders.publish([message(1)])
    orders.run_until_idle(subscribe(), fail)
    assert len(dead_letters.list_dead_letters(orders.run, "g")) == 1
    assert timed_out(orders) == []
    assert_counted(orders, 0)


@pytest.mark.parametrize("mode", [Mode.KEY_ORDERED, Mode.ORDERLY])
def test_the_end_of_the_limit_unblocks_the_key(bench: ConsumptionBench, mode: Mode) -> None:
    bench.declare("orders", queues=1, types=FIFO)
    seen: list[int] = []

    def handle(delivery: Delivery) -> None:
        if delivery.body["n"] == 1:
            raise ValueError("not now")
        seen.append(delivery.body["n"])

    bench.publish([message(1, "1", key="k"), message(2, "", key="k")])
    with bench.running((subscribe(mode=mode, suspend_seconds=3600), handle)):
        eventually(lambda: seen == [2], what="the next message of the key")
        eventually(lambda: bench.lag("g") == 0)
    assert timed_out(bench) == [1]
    assert_counted(bench, 1)


def test_a_message_whose_limit_ends_while_it_is_held_is_timed_out_when_it_is_released(bench: ConsumptionBench) -> None:
    bench.declare("orders", queues=1, types=FIFO | {MessageType.NORMAL})
    seen = Seen()
    half = HalfTransaction(producer_group="p", messages=[message(1, "", key="k")], ledger_id=uuid7())
    bench.broker.send_half(half)
    bench.publish([message(2, key="k"), message(3, "", key="k")])
    let_limits_end(bench)
    bench.run_until_idle(subscribe(mode=Mode.KEY_ORDERED), seen)
    assert bench.rows("SELECT count(*) FROM outbox.held") == [(2,)], "the earlier message is undecided"
    assert timed_out(bench) == []
    end = EndTransaction(transaction_id=half.transaction_id, decision=Decision.COMMIT, producer_group="p")
    bench.broker.end([end])
    bench.sequence()
    bench.run_until_idle(subscribe(mode=Mode.KEY_ORDERED), seen)
    assert seen.take() == [1, 3]
    assert timed_out(bench) == [2]
    assert_counted(bench, 1)


def test_what_is_recorded_before_a_crash_is_counted_once(orders: ConsumptionBench) -> None:
    """The process is gone after the row of `timed_out` and before the offset."""
    seen = Seen()
    orders.publish([message(1), message(2, "")])
    let_limits_end(orders)
    process = orders.spawn("killed", topic="orders", group="g", faults="consumer.after_send_back=kill")
    assert process.wait(20) == -9
    assert timed_out(orders) == [1]
    eventually(lambda: not orders.owners(), what="the end of the lease")
    orders.run_until_idle(subscribe(), seen)
    assert seen.take() == [2]
    assert timed_out(orders) == [1]
    assert_counted(orders, 1)


def test_a_reset_does_not_bring_a_message_back_after_its_limit(orders: ConsumptionBench) -> None:
    seen = Seen()
    orders.publish([message(1), message(2, "")])
    let_limits_end(orders)
    orders.run_until_idle(subscribe(), seen)
    changes.reset(orders.run, "g", "orders", Start.EARLIEST)
    orders.run_until_idle(subscribe(), seen)
    assert seen.take() == [2, 2]
    assert timed_out(orders) == [1, 1], "two entries of its position, two rows"
    assert_counted(orders, 2)


def test_a_broadcast_group_does_not_get_it_either(orders: ConsumptionBench) -> None:
    seen = Seen()
    with orders.running((subscribe(broadcast=True), seen)):
        orders.publish([message(1, ""), message(2, "0.000001"), message(3, "")])
        eventually(lambda: 3 in seen.ns and 1 in seen.ns)
    assert seen.take() == [1, 3]
    assert timed_out(orders) == [], "a broadcast group has no positions and no rows"


def test_a_header_of_another_form_in_a_stored_message_is_no_limit(orders: ConsumptionBench) -> None:
    """No producer of this library stores such a header; a statement of the fetch must not fail on it."""
    cases: list[str] = ["soon", "-1", "1e3", "1.1234567", " 1", "12345678901", ""]
    for text in cases:
        seen = Seen()
        orders.publish([message(1)])
        orders.connection.execute(
            "UPDATE outbox.commit_log SET headers = jsonb_build_object('outbox-timeout', %s::text)", (text,)
        )
        let_limits_end(orders)
        orders.run_until_idle(subscribe(), seen)
        assert seen.take() == [1]


def test_a_wrong_limit_is_refused() -> None:
    for text in ("0", "0.0", "-1", "soon", "1e9", "", "1234567890", "1\n"):
        with pytest.raises(InvalidMessage, match="positive number of seconds"):
            message(1, headers={TIMEOUT_HEADER: text})


def test_a_limit_beyond_the_retention_of_the_topic_is_refused(orders: ConsumptionBench) -> None:
    with pytest.raises(InvalidMessage, match="keeps messages for 259200 s"):
        orders.publish([message(1, "259201")])
    orders.publish([message(1, "259200")])


def test_trace_and_summary_show_it(orders: ConsumptionBench) -> None:
    """Also a summary of an earlier version is read."""
    one = message(1)
    orders.publish([one])
    let_limits_end(orders)
    orders.run_until_idle(subscribe(), Seen())
    found = trace(orders.run, one.message_id)
    assert found is not None
    assert [entry.state for entry in found.entries] == [EntryState.TIMED_OUT]
    assert [rest.timed_out for rest in summary.refresh(orders.run).rests] == [1]
    assert [rest.timed_out for rest in summary.read(orders.run).rests] == [1]
    orders.connection.execute(
        "UPDATE outbox.summary SET facts = jsonb_set(facts, '{rests}', replace(replace((facts -> 'rests')::text,"
        " ', \"timed_out\"]', ']'), ', 1]', ']')::jsonb)"
    )
    assert [rest.timed_out for rest in summary.read(orders.run).rests] == [0]


def test_retention_removes_the_row_and_keeps_the_count(orders: ConsumptionBench) -> None:
    orders.publish([message(1), message(2, "")])
    let_limits_end(orders)
    orders.run_until_idle(subscribe(), Seen())
    assert_counted(orders, 1)
    orders.connection.execute("UPDATE outbox.topic SET retention_seconds = 1")
    orders.connection.execute("UPDATE outbox.consume_queue SET queued_at = now() - interval '1 day'")
    orders.connection.execute("UPDATE outbox.op_log SET decided_at = now() - interval '1 day'")
    retention.run_once(orders.run)
    assert orders.rows("SELECT count(*) FROM outbox.commit_log") == [(0,)]
    assert timed_out(orders) == []
    assert orders.rows("SELECT count(*) FROM outbox.timed_out") == [(0,)]
    assert_counted(orders, 1)


def test_a_statement_of_sql_publishes_a_limit_and_refuses_a_wrong_one(orders: ConsumptionBench) -> None:
    publish = "SELECT outbox.publish('orders', '{\"n\": 1}', headers => jsonb_build_object('outbox-timeout', %s::text))"
    orders.connection.execute(publish.encode(), ("60",))
    for wrong in ("0", "0.000", "soon", "-1", ""):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="positive number of seconds"):
            orders.connection.execute(publish.encode(), (wrong,))
    orders.sequence()
    let_limits_end(orders)
    orders.run_until_idle(subscribe(), Seen())
    assert timed_out(orders) == [1]


def test_a_failed_call_of_a_claimed_message_waits_no_longer_than_the_limit(orders: ConsumptionBench) -> None:
    proceed = threading.Event()

    def claim(
        subscription: Subscription, handler: Any, given: Delivery, claimed: Callable[[float], None], *, generation: int
    ) -> Exception:
        claimed(30.0)
        assert proceed.wait(60)
        return ValueError("the other system has refused the call")

    orders.publish([message(1)])
    slow = subscribe(retry=LATER, effects=Effects.OUTSIDE)
    with orders.running((slow, Seen()), claim=claim):
        eventually(lambda: orders.rows("SELECT 1 FROM outbox.scheduled"), within_seconds=60)
        proceed.set()
        eventually(lambda: orders.rows("SELECT 1 FROM outbox.failure"), within_seconds=60)
    [(wait,)] = orders.rows("SELECT extract(epoch FROM due_at - now()) FROM outbox.scheduled")
    assert wait <= 60


def test_a_process_that_does_not_claim_obeys_the_limit_itself(orders: ConsumptionBench) -> None:
    seen = Seen()
    orders.publish([message(1)])
    let_limits_end(orders)
    orders.run_until_idle(subscribe(effects=Effects.OUTSIDE), seen)
    assert (seen.take(), timed_out(orders)) == ([], [1])
