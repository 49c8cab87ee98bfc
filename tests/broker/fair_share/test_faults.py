"""Messages that overtake others are handled once, whatever process dies or leaves meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from outbox.broker.consumer.runtime import ConsumerRuntime
from outbox.broker.database.connection import BrokerDatabase
from outbox.message import Delivery
from outbox.ports import AnyHandler
from tests.broker.bench import ConsumptionBench
from tests.broker.fair_share.support import fair, of
from tests.broker.inbox import InboxInvoker
from tests.support import eventually, killed

FLOOD, OTHERS = 600, 40
_EFFECT = "INSERT INTO effect (instance, queue, key, n, message_id, attempt) VALUES (%s, %s, %s, %s, %s, %s)"

# A point, and the visit at which the process dies. By then, other tenants have overtaken the flood.
KILLS = {
    "consumer.before_handler": 60,
    "consumer.before_inbox_commit": 60,
    "consumer.after_inbox_commit": 60,
    "consumer.before_offset": 3,
    "consumer.after_offset": 3,
    "consumer.before_send_back": 1,
    "consumer.after_send_back": 1,
}


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders", queues=2)
    bench.publish([*of("a", FLOOD), *(message for n in range(OTHERS) for message in of(f"t{n}", 1))])
    return bench


def effects_of(invoker: InboxInvoker, name: str) -> AnyHandler:
    """A handler that writes an effect. Every tenth of the other tenants' messages fails at first."""

    def handle(delivery: Delivery) -> None:
        tenant, n = delivery.body["tenant"], delivery.body["n"]
        if tenant.endswith("0") and delivery.attempt == 1:
            raise ValueError(f"the first attempt of {delivery.message_id} fails")
        invoker.connection.execute(_EFFECT, [name, delivery.queue, tenant, n, delivery.message_id, delivery.attempt])

    return handle


@contextlib.contextmanager
def consumer(orders: ConsumptionBench, name: str) -> Iterator[None]:
    """A consumer, with an inbox and a handler that writes effects under its name."""
    invoker = InboxInvoker(orders.url)
    with orders.running((fair(threads=2), effects_of(invoker, name)), invoker=invoker):
        yield
    invoker.close()


def killed_at(orders: ConsumptionBench, point: str, visit: int) -> bool:
    """Whether a consumer process was killed at a visit of a point."""

    def work() -> None:
        invoker = InboxInvoker(orders.url)
        ConsumerRuntime(
            BrokerDatabase(conninfo=orders.url),
            [(fair(threads=2), effects_of(invoker, "killed"))],
            invoker=invoker,
            lease_seconds=1.0,
        ).run_once()

    return killed(work, f"{point}=kill@{visit}")


def assert_each_once(orders: ConsumptionBench, expected: int = FLOOD + OTHERS) -> None:
    effects = [(key, n) for _, key, n, _ in orders.effects()]
    assert len(effects) == len(set(effects)) == expected
    orders.assert_conserved("g")


def survives(orders: ConsumptionBench, point: str) -> None:
    assert killed_at(orders, point, KILLS[point])
    with orders.sequencing(), consumer(orders, "heir"):
        eventually(lambda: orders.effect_count() == FLOOD + OTHERS, within_seconds=60)
        eventually(lambda: orders.lag("g") == 0 and orders.retrying() == 0)
    assert_each_once(orders)


def test_a_kill_after_others_have_overtaken_repeats_and_loses_nothing(orders: ConsumptionBench) -> None:
    survives(orders, "consumer.after_inbox_commit")
    overtaking = "SELECT count(*) FROM effect WHERE instance = 'killed' AND key <> 'a'"
    assert orders.rows(overtaking)[0][0] > OTHERS / 4


@pytest.mark.slow
@pytest.mark.parametrize("point", KILLS)
def test_a_kill_at_any_step_repeats_and_loses_nothing(orders: ConsumptionBench, point: str) -> None:
    survives(orders, point)


def test_queues_that_go_to_another_process_and_back(orders: ConsumptionBench) -> None:
    orders.publish(of("d", 1_500))
    expected = FLOOD + OTHERS + 1_500 + 301
    with orders.sequencing(), consumer(orders, "first"):
        eventually(lambda: orders.effect_count() >= 60)
        with consumer(orders, "second"):
            orders.wait_for_shares(1, 1)
            orders.publish([*of("b", 300), *of("c", 1)])
            late = "SELECT count(*) FROM effect WHERE key = 'c'"
            eventually(lambda: orders.rows(late) == [(1,)], within_seconds=30)
        eventually(lambda: orders.effect_count() == expected, within_seconds=60)
        eventually(lambda: orders.lag("g") == 0 and orders.retrying() == 0)
    assert_each_once(orders, expected)


def test_a_lost_connection_repeats_and_loses_nothing(orders: ConsumptionBench) -> None:
    cut = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'outbox-consumer%%' AND %s"
    )
    with orders.sequencing(), consumer(orders, "first"):
        for part in range(1, 4):
            eventually(lambda part=part: orders.effect_count() > 100 * part)  # type: ignore[misc]
            orders.rows(cut, True)
        eventually(lambda: orders.effect_count() == FLOOD + OTHERS, within_seconds=60)
        eventually(lambda: orders.lag("g") == 0 and orders.retrying() == 0)
    assert_each_once(orders)
