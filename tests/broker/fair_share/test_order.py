"""Each tenant has its turn, whatever waits of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from outbox import hooks
from outbox.broker.consumer import dispatcher
from outbox.broker.consumer.fetch import Fetcher, Row
from outbox.broker.consumer.lanes import FetchedEntry
from outbox.broker.operations import dead_letters
from outbox.contrib.fair_share import FairShare
from outbox.contrib.fair_share.lane import FairLane
from outbox.errors import ConfigurationError, InvalidSubscription
from outbox.message import Delivery
from outbox.subscription import Mode, Subscription
from tests.broker.bench import ConsumptionBench
from tests.broker.fair_share.support import HEADER, PREFIX, Gate, Handled, fair, of
from tests.broker.test_hostile_rows import _ROW, NOT_LOADED, row
from tests.support import eventually

# More than the process looks ahead without the option.
FLOOD = 5_000


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders", queues=1)
    return bench


@pytest.fixture
def all_fetched(orders: ConsumptionBench, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """A function that waits until all messages of the log were fetched, once more at each call. Nothing is polled."""
    fetch, found = Fetcher.fetch, [0]

    def counted(self: Fetcher, *arguments: Any) -> list[Row]:
        rows = fetch(self, *arguments)
        found[0] += len(rows)
        return rows

    monkeypatch.setattr(Fetcher, "fetch", counted)
    monkeypatch.setattr(dispatcher, "_LISTENING_POLL_SECONDS", 3600.0)

    def wait() -> None:
        with psycopg.connect(orders.url) as connection:
            [count] = connection.execute("SELECT count(*) FROM outbox.commit_log").fetchone() or [0]
        eventually(lambda: found[0] >= count, what=lambda: f"{found[0]} of {count} messages are fetched")
        found[0] -= count

    return wait


@pytest.mark.parametrize(("option", "size"), [(HEADER, 0), (PREFIX, 20_000)], ids=["small", "large, key prefix"])
def test_a_flood_of_one_tenant_does_not_delay_the_others(
    orders: ConsumptionBench, all_fetched: Callable[[], object], option: FairShare, size: int
) -> None:
    flood = FLOOD if size == 0 else 600
    counts = {"a": flood, "b": 3, "c": 1}
    orders.publish([one for name, count in counts.items() for one in of(name, count, size=size, option=option)])
    handled = Handled(all_fetched)
    with orders.running((fair(option), handled)):
        handled.all_of(orders, flood + 4)
    # Some calls of `a` were on their way to the thread when the others were fetched.
    assert max(handled.places("c")) < 10
    assert max(handled.places("b")) < 20
    assert [n for tenant, n in handled.calls if tenant == "a"] == list(range(flood))
    orders.assert_conserved("g")


def test_each_instance_of_a_broadcast_group_takes_the_tenants_in_turn(
    orders: ConsumptionBench, all_fetched: Callable[[], object]
) -> None:
    """A failed message is tried again in the process, in the turn of its tenant."""
    orders.publish([*of("a", 300), *of("b", 2)])
    everything = sorted([*(("a", n) for n in range(300)), ("b", 0), ("b", 1)])
    for _ in range(2):
        failed: list[int] = []

        def fails(delivery: Delivery, failed: list[int] = failed) -> bool:
            is_first = delivery.body["tenant"] == "b" and not failed
            failed.extend([delivery.attempt] if is_first else [])
            return is_first

        handled = Handled(all_fetched, fails)
        with orders.running((fair(broadcast=True), handled)):
            eventually(lambda: len(handled.calls) == 302, within_seconds=90)  # noqa: B023
        assert (sorted(handled.calls), failed) == (everything, [1])
        assert max(handled.places("b")) < 20


def test_control_without_the_option_the_others_wait(orders: ConsumptionBench) -> None:
    orders.publish([*of("a", 300), *of("b", 1)])
    handled = Handled()
    orders.run_until_idle(fair(None), handled)
    assert handled.places("b") == [300]


def test_tenants_with_many_messages_have_equal_shares(
    orders: ConsumptionBench, all_fetched: Callable[[], object]
) -> None:
    """No tenant has enough messages to be noticed alone, and all of them are before the message of the last one."""
    tenants = [f"t{number}" for number in range(100)]
    messages = [of(tenant, 20) for tenant in tenants]
    orders.publish([*(message for turn in zip(*messages, strict=True) for message in turn), *of("last", 1)])
    handled = Handled(all_fetched)
    with orders.running((fair(), handled)):
        handled.all_of(orders, 2_001)
    assert max(handled.places("last")) < 120


def test_several_queues(bench: ConsumptionBench) -> None:
    bench.declare("orders", queues=4)
    bench.publish([*of("a", 1_200), *(message for n in range(20) for message in of(f"t{n}", 1))])
    handled = Handled()
    gate, of_others = Gate(handled), [-1]

    def others_are_handled() -> bool:
        calls = list(handled.calls)
        of_others[0] = sum(tenant == "a" for tenant, _ in calls)
        return len(calls) - of_others[0] == 20

    with bench.running((fair(), gate)):
        # The process may get the queues one after the other.
        gate.until(others_are_handled)
        handled.all_of(bench, 1_220)
    assert of_others[0] < 600
    bench.assert_conserved("g")


def test_a_failing_message_is_tried_again_in_the_turn_of_its_tenant(orders: ConsumptionBench) -> None:
    handled = Handled(fails=lambda delivery: delivery.headers["tenant"] == "b" and delivery.attempt < 3)
    gate = Gate(handled)
    orders.publish([*of("a", FLOOD), *of("b", 2)])
    with orders.sequencing(), orders.running((fair(), gate)):
        gate.until(lambda: len(handled.places("b")) == 2)
        handled.all_of(orders, FLOOD + 2)
    assert max(handled.places("b")) < FLOOD
    orders.assert_conserved("g")


def test_messages_without_a_tenant_are_those_of_one_tenant(
    orders: ConsumptionBench, all_fetched: Callable[[], object]
) -> None:
    orders.publish([*of("a", 600, option=PREFIX), *of("b", 1)])
    handled = Handled(all_fetched)
    with orders.running((fair(), handled)):
        handled.all_of(orders, 601)
    assert max(handled.places("b")) < 10


@pytest.mark.parametrize("option", [HEADER, PREFIX], ids=["header", "key prefix"])
def test_hostile_tenants_count_for_themselves(orders: ConsumptionBench, option: FairShare) -> None:
    values: list[dict[str, Any]] = [
        *({"headers": Jsonb({"tenant": value})} for value in (["a"], 1, None, {"a": "b"})),
        *({"headers": Jsonb(value)} for value in (["tenant"], "tenant", 1)),
        *NOT_LOADED.values(),
    ]
    readable: list[dict[str, Any]] = [
        *({"headers": Jsonb({"tenant": "x" * 100_000 + end})} for end in "yz"),
        {"headers": Jsonb({"tenant": "", "other": "y"})},
        *({"key": key} for key in ("k" * 100_000, ":", "::", "a:b:c", "")),
    ]
    with pytest.raises(psycopg.errors.UntranslatableCharacter):
        orders.connection.execute("""SELECT '{"tenant": "\\u0000"}'::jsonb""")
    for one in (*values, *readable):
        orders.connection.execute(_ROW, row(orders, **one))
    orders.publish([*of("a", 60, option=option), *of("b", 1, option=option)])
    count = [0]

    def handle(delivery: Delivery) -> None:
        count[0] += 1

    orders.run_until_idle(fair(option), handle)
    assert count[0] == len(readable) + 61
    letters = dead_letters.list_dead_letters(orders.run, "g")
    assert len(letters) == len(values)
    assert all(letter.error.startswith("UndecodableBody") for letter in letters)
    orders.assert_conserved("g")


class Watched(FairLane):
    """Records how many tenants and rows are in memory, at every 50th call."""

    tenants, rows, waiting_most = 0, 0, 0
    calls = 0

    def take(self, now: float) -> list[FetchedEntry]:
        Watched.calls += 1
        if Watched.calls % 50 == 0:
            rows = sum(item.row is not None for named in self._names.values() for item in named.items)
            Watched.rows, Watched.tenants = max(Watched.rows, rows), max(Watched.tenants, len(self._names))
            Watched.waiting_most = max(Watched.waiting_most, self.waiting)
        return super().take(now)


@pytest.mark.slow
def test_ten_thousand_tenants_do_not_fill_the_memory(orders: ConsumptionBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks.lanes, FairShare, f"{__name__}.Watched")
    orders.publish([*of("a", 3_000), *(message for n in range(10_000) for message in of(f"t{n}", 1))])
    handled = Handled()
    with orders.running((fair(threads=4), handled)):
        handled.all_of(orders, 13_000)
    assert 500 < Watched.tenants < 3_000
    assert 0 < Watched.rows < 2_000
    assert Watched.waiting_most > 2_000
    orders.assert_conserved("g")


def test_what_cannot_be_shared_is_refused() -> None:
    for fields, complaint in (
        ({"mode": Mode.ORDERLY}, "mode='orderly' keeps an order"),
        ({"mode": Mode.KEY_ORDERED}, "mode='key_ordered' keeps an order"),
        ({"batch": 5}, "needs batch=1"),
        ({"options": [HEADER, PREFIX]}, "only one option may decide which message is next"),
    ):
        given: dict[str, Any] = {"topic": "orders", "group": "g", "options": [HEADER], **fields}
        with pytest.raises(InvalidSubscription, match=complaint):
            Subscription(**given)
    for options, complaint in (
        ({}, "does not say what the tenant"),
        ({"header": "tenant", "key_prefix": ":"}, "give either header"),
        ({"header": "no header"}, "header name 'no header' is not allowed"),
        ({"header": ["tenant"]}, "give a text"),
        ({"key_prefix": ""}, "give a text"),
        ({"key_prefix": 1}, "give a text"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            FairShare(**options)
