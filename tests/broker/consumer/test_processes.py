"""Consumers as real processes: killed, frozen, joining; and broken variants that these tests must catch."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from outbox.broker.groups.leases import lease_clock
from tests.broker.bench import FIFO, ConsumptionBench, assert_each_once_in_order, keyed
from tests.support import eventually

ORDERED = ["orderly", "key_ordered"]


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders", queues=6, types=FIFO)
    return bench


def started(bench: ConsumptionBench, count: int, **options: Any) -> list[subprocess.Popen[bytes]]:
    """So many consumers, each with its share."""
    processes = [bench.spawn(f"c{n}", **options) for n in range(count)]
    share = 6 // count
    bench.wait_for_shares(*[share] * count)
    return processes


def each_once(bench: ConsumptionBench, expected: int) -> None:
    rows = bench.rows("SELECT count(*), count(DISTINCT message_id) FROM effect")
    assert rows == [(expected, expected)]


@pytest.mark.parametrize(
    ("mode", "count"),
    [
        pytest.param("concurrent", 3, marks=pytest.mark.soak),
        pytest.param("orderly", 2, marks=pytest.mark.slow),
        pytest.param("key_ordered", 3, marks=pytest.mark.slow),
    ],
)
def test_one_of_several_consumers_killed_midway(orders: ConsumptionBench, mode: str, count: int) -> None:
    processes = started(orders, count, mode=mode, seconds=0.002)
    orders.publish(keyed("orders", 1_500, 100))
    eventually(lambda: orders.effect_count() >= 300)
    processes[0].kill()
    eventually(lambda: orders.lag("g") == 0)
    each_once(orders, 1_500)
    if mode in ORDERED:
        assert_each_once_in_order(orders.effects(), 1_500)
    assert {name for name, *_ in orders.effects()} == {f"c{n}" for n in range(count)}
    for process in processes[1:]:
        assert orders.stop(process) == 0
    orders.assert_conserved("g")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("orderly", marks=pytest.mark.soak), "key_ordered"])
def test_joins_2_to_4_consumers_while_messages_flow(orders: ConsumptionBench, mode: str) -> None:
    orders.declare("orders", queues=6, types=FIFO)
    started(orders, 2, mode=mode, seconds=0.002, lease_seconds=6.0)
    messages = keyed("orders", 2_000, 100)
    orders.publish(messages[:1_000])
    for name in ("c2", "c3"):
        orders.spawn(name, mode=mode, seconds=0.002, lease_seconds=6.0)
    orders.wait_for_shares(1, 1, 2, 2)
    orders.publish(messages[1_000:])
    eventually(lambda: orders.lag("g") == 0)
    assert_each_once_in_order(orders.effects(), 2_000)
    # Handing over finished what ran: without an inbox, too, nothing was handled twice.
    skipped = orders.rows("SELECT sum(skipped) FROM outbox.offset_v1")[0][0]
    assert skipped == 0
    orders.assert_conserved("g")


def test_leaving_hands_over_at_once_and_costs_no_redelivery(orders: ConsumptionBench) -> None:
    processes = started(orders, 2, mode="key_ordered", seconds=0.002, lease_seconds=120.0, inbox=False)
    orders.publish(keyed("orders", 1_000, 100))
    eventually(lambda: orders.effect_count() >= 200)
    # With a term of 120 s, the other one can finish in time only if the leases are released.
    assert orders.stop(processes[0]) == 0
    eventually(lambda: orders.lag("g") == 0, within_seconds=60)
    assert_each_once_in_order(orders.effects(), 1_000)


@pytest.mark.parametrize(
    "step",
    [
        *(pytest.param(step, marks=pytest.mark.slow) for step in ("before_handler@20", "after_inbox_commit@20")),
        *("before_inbox_commit@20", "before_offset@3"),
        pytest.param("after_offset@3", marks=pytest.mark.slow),
    ],
)
def test_killed_at_every_step_takes_effect_once(orders: ConsumptionBench, step: str) -> None:
    point, visit = step.split("@")
    victim = orders.spawn("victim", mode="key_ordered", seconds=0.01, faults=f"consumer.{point}=kill@{visit}")
    orders.wait_for_shares(6)
    for start in range(0, 400, 10):
        orders.publish(keyed("orders", 10, 20, start=start))
    assert victim.wait(20) == -signal.SIGKILL
    orders.spawn("heir", mode="key_ordered")
    eventually(lambda: orders.lag("g") == 0)
    assert_each_once_in_order(orders.effects(), 400)


# -- frozen processes -------------------------------------------------------------------------------


def frozen_before_a_handler(orders: ConsumptionBench, broken: str) -> list[tuple[Any, ...]]:
    """A consumer freezes right before a handler, is taken over by another, and thaws when that one is done."""
    # There is no inbox here, so a second delivery would count: also on a busy machine only the freeze may end the
    # lease.
    patient: dict[str, Any] = {"mode": "orderly", "inbox": False, "lease_seconds": 6.0, "idle_seconds": 5.0}
    zombie = orders.spawn("zombie", threads=1, broken=broken, faults="consumer.before_handler=stop@61", **patient)
    orders.wait_for_shares(6)
    messages = keyed("orders", 600, 60)
    orders.publish(messages[:60])
    eventually(
        lambda: orders.effect_count() == 60 and orders.lag("g") == 0,
        what=lambda: f"{orders.effect_count()} effects, lag {orders.lag('g')}",
    )
    orders.publish(messages[60:])
    eventually(lambda: Path(f"/proc/{zombie.pid}/stat").read_text().split()[2] == "T")
    orders.spawn("heir", **patient)
    eventually(lambda: orders.lag("g") == 0)
    assert orders.effect_count() == 600
    position = orders.rows("SELECT max(position) FROM effect")[0][0]
    zombie.send_signal(signal.SIGCONT)
    # It has understood when it holds queues again.
    eventually(lambda: orders.members() == 2)
    orders.wait_for_shares(3, 3)
    return orders.rows("SELECT instance, key, n FROM effect WHERE position > %s", position)


@pytest.mark.slow
def test_frozen_owner_is_fenced_after_sigcont(orders: ConsumptionBench) -> None:
    assert frozen_before_a_handler(orders, "") == []
    assert_each_once_in_order(orders.effects(), 600)
    orders.assert_conserved("g")


@pytest.mark.slow
def test_control_a_runtime_without_fencing_is_caught(orders: ConsumptionBench) -> None:
    """It handles what it had fetched before it froze, although another has handled that since."""
    late = frozen_before_a_handler(orders, "no_fencing")
    assert late and {row[0] for row in late} == {"zombie"}
    with pytest.raises(AssertionError, match="out of order or doubled"):
        assert_each_once_in_order(orders.effects(), 600)


@pytest.mark.parametrize(
    "mode", [*(pytest.param(m, marks=pytest.mark.soak) for m in ("concurrent", "orderly")), "key_ordered"]
)
def test_frozen_in_the_middle_of_its_transaction_takes_effect_once(orders: ConsumptionBench, mode: str) -> None:
    """The inbox row it holds is freed by the server, its late commit is refused, and its lease is gone."""
    zombie = orders.spawn("zombie", mode=mode, faults="consumer.before_inbox_commit=stop@30")
    orders.wait_for_shares(6)
    orders.publish(keyed("orders", 300, 30))
    eventually(lambda: Path(f"/proc/{zombie.pid}/stat").read_text().split()[2] == "T")
    orders.spawn("heir", mode=mode)
    eventually(lambda: orders.lag("g") == 0)
    zombie.send_signal(signal.SIGCONT)
    orders.wait_for_shares(3, 3)
    each_once(orders, 300)
    if mode in ORDERED:
        assert_each_once_in_order(orders.effects(), 300)


# -- handing over -----------------------------------------------------------------------------------


def in_flight(orders: ConsumptionBench) -> int:
    """Handlers that wait at the gate, in their transactions."""
    rows = orders.rows(
        "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = current_database()"
    )
    return int(rows[0][0])


def joined_while_messages_are_in_flight(orders: ConsumptionBench, gate: Path, broken: str) -> None:
    """The only consumer is in the middle of a handler for each of its queues when another joins."""
    options: dict[str, Any] = {"mode": "orderly", "inbox": False, "gate": str(gate), "threads": 6, "idle_seconds": 60}
    orders.spawn("first", broken=broken, **options)
    orders.wait_for_shares(6)
    orders.publish(keyed("orders", 60, 60))
    eventually(lambda: in_flight(orders) == 6)
    orders.spawn("second", **options)
    eventually(lambda: orders.members() == 2)


def test_rebalance_does_not_hand_over_a_queue_with_messages_in_flight(orders: ConsumptionBench, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    joined_while_messages_are_in_flight(orders, gate, "")
    owners = orders.owners()
    # Long enough for several looks of both coordinators, and for leases that are not renewed to run out.
    until = lease_clock() + 1.8
    eventually(lambda: lease_clock() > until)
    assert orders.owners() == owners
    gate.touch()
    orders.wait_for_shares(3, 3)
    eventually(lambda: orders.lag("g") == 0)
    each_once(orders, 60)


def test_control_handing_over_without_draining_is_caught(orders: ConsumptionBench, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    joined_while_messages_are_in_flight(orders, gate, "no_drain")
    # The newcomer handles what is being handled.
    eventually(lambda: in_flight(orders) > 6)
    gate.touch()
    eventually(lambda: orders.lag("g") == 0)
    with pytest.raises(AssertionError):
        each_once(orders, 60)


# -- the database goes away -------------------------------------------------------------------------


@pytest.mark.slow
def test_connections_terminated_again_and_again(orders: ConsumptionBench) -> None:
    started(orders, 2, mode="key_ordered", seconds=0.002)
    messages = keyed("orders", 1_000, 100)
    for start in range(0, 1_000, 100):
        orders.publish(messages[start : start + 100])
        orders.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name IN ('outbox-consumer', 'outbox-coordinator')"
        )
    eventually(lambda: orders.lag("g") == 0)
    assert_each_once_in_order(orders.effects(), 1_000)
    orders.assert_conserved("g")
