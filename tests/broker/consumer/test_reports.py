"""What real consumer processes tell operators: their version, their queues, and the handler calls that run."""

from __future__ import annotations

import signal
from importlib import metadata
from pathlib import Path

import pytest

from outbox.broker.database.executor import Row
from outbox.broker.operations.listings import list_processes
from tests.broker.bench import ConsumptionBench, keyed
from tests.support import eventually


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders", queues=6)
    return bench


def one_process(bench: ConsumptionBench) -> Row:
    [found] = list_processes(bench.run)
    return found


def test_a_process_reports_its_running_calls_until_they_end(orders: ConsumptionBench, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    process = orders.spawn("c0", gate=str(gate), threads=2, lease_seconds=1.5)
    orders.wait_for_shares(6)
    messages = keyed("orders", 5, 5)
    orders.publish(messages)
    eventually(lambda: one_process(orders).calls == 2, what="two calls, one per thread")
    first = one_process(orders)
    assert (first.pid, first.groups, first.queues, first.is_alive, first.leads) == (process.pid, ["g"], 6, True, False)
    assert first.version == metadata.version("outbox-transactional")
    assert {(call.group, call.topic, call.messages, call.attempt) for call in first.running} == {("g", "orders", 1, 1)}
    assert {call.message_id for call in first.running} < {str(one.message_id) for one in messages}
    assert first.running[0].seconds >= first.running[1].seconds > 0
    # The next renewal reports the same calls, which have run for longer.
    later = eventually(lambda: [one for one in list_processes(orders.run) if one.seen_at != first.seen_at])[0]
    assert later.running[0].message_id == first.running[0].message_id
    assert later.running[0].seconds > first.running[0].seconds
    gate.touch()
    eventually(lambda: (orders.lag("g"), one_process(orders).calls, one_process(orders).running) == (0, 0, []))
    assert orders.stop(process) == 0
    assert list_processes(orders.run) == []
    # A process that leaves its groups removes its row.
    assert orders.rows("SELECT count(*) FROM outbox.consumer_process") == [(0,)]


def test_a_killed_process_is_listed_as_vanished(orders: ConsumptionBench) -> None:
    process = orders.spawn("c0", lease_seconds=1.5)
    orders.wait_for_shares(6)
    assert one_process(orders).is_alive
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    # The leases end a moment after the membership, because the process renewed them a moment later.
    eventually(lambda: (one_process(orders).is_alive, one_process(orders).queues) == (False, 0), what="the end of both")
    assert one_process(orders).pid == process.pid
    assert list_processes(orders.run, "another") == []
    # Without a report, too.
    orders.connection.execute("DELETE FROM outbox.consumer_process")
    found = one_process(orders)
    assert (found.version, found.seen_at, found.calls, found.running) == ("", None, 0, [])


def test_a_process_that_drains_says_so_while_its_calls_end(orders: ConsumptionBench, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    process = orders.spawn("c0", gate=str(gate), threads=2, lease_seconds=1.5)
    orders.wait_for_shares(6)
    orders.publish(keyed("orders", 40, 40))
    eventually(lambda: one_process(orders).calls == 2, what="two calls, one per thread")
    process.send_signal(signal.SIGTERM)
    eventually(lambda: one_process(orders).state == "draining", what="the state")
    assert one_process(orders).calls == 2
    gate.touch()
    assert process.wait(20) == 0
    # Messages before the last one that has started are handled too, because a position has no holes.
    assert 2 <= orders.effect_count() < 40 and list_processes(orders.run) == []
