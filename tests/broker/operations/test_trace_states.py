"""A trace names the state of a message in each group."""

from __future__ import annotations

from outbox.broker.operations.changes import reset
from outbox.broker.operations.trace import trace
from outbox.message import Message
from outbox.subscription import Start
from tests.broker.bench import ConsumptionBench
from tests.broker.operations.support import consume, group_of, publish


def _states(bench: ConsumptionBench, message: Message) -> dict[str | None, list[str]]:
    found = trace(bench.run, message.message_id)
    assert found is not None
    states: dict[str | None, list[str]] = {}
    for entry in found.entries:
        states.setdefault(entry.group, []).append(str(entry.state))
    return states


def test_filtered_handled_sent_back_and_dead_are_distinguished(bench: ConsumptionBench) -> None:
    bench.declare("orders", queues=1)
    (alone,) = publish(bench, "x")
    assert _states(bench, alone) == {None: ["no group"]}
    consume(bench, "paid", only="paid")
    consume(bench)
    plain, later, bad = publish(bench, "plain", "later", "bad")
    (paid,) = publish(bench, "paid", tag="paid")
    assert _states(bench, plain) == {"g": ["waiting"], "paid": ["waiting"]}
    consume(bench, "paid", only="paid")
    consume(bench)
    assert _states(bench, plain) == {"g": ["handled"], "paid": ["filtered"]}
    assert _states(bench, paid) == {"g": ["handled"], "paid": ["handled"]}
    assert _states(bench, later) == {"g": ["sent back", "handled"], "paid": ["filtered"]}
    assert _states(bench, bad) == {"g": ["dead"], "paid": ["filtered"]}
    counted = group_of(bench, "paid")
    assert (counted.handled, counted.filtered, counted.skipped) == (1, 4, 0)
    # A message that a reset skipped was not handled; the reset itself is not stored.
    (over,) = publish(bench, "over")
    reset(bench.run, "g", "orders", Start.LATEST)
    assert _states(bench, over)["g"] == ["handled or skipped"]
