"""Dead letters end: replayed or discarded, chosen by what they have in common; and they block nothing behind them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from outbox.broker.database.executor import Executor
from outbox.broker.groups import registration
from outbox.broker.operations.changes import reset
from outbox.broker.operations.dead_letters import LetterSelection, discard, list_dead_letters, replay
from outbox.broker.operations.trace import trace
from outbox.subscription import Start
from tests.broker.bench import ConsumptionBench
from tests.broker.operations.support import age, clean, consume, group_of, keys, publish


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders", queues=1)
    return bench


def _dead(bench: ConsumptionBench, **selection: object) -> list[str]:
    return sorted(letter.key for letter in list_dead_letters(bench.run, "g", LetterSelection(**selection)))  # type: ignore[arg-type]


def test_they_are_chosen_by_error_type_key_topic_and_time(orders: ConsumptionBench) -> None:
    orders.declare("points", queues=1)
    publish(orders, "bad 1", "bad 2", "bad type", "good")
    publish(orders, "bad 1", topic="points")
    consume(orders)
    consume(orders, topic="points")
    assert _dead(orders) == ["bad 1", "bad 1", "bad 2", "bad type"]
    assert _dead(orders, topic="points") == ["bad 1"]
    assert _dead(orders, error="EVER work: bad 2") == ["bad 2"]
    assert _dead(orders, error_type="TypeError") == ["bad type"]
    assert _dead(orders, error_type="Type") == []
    assert _dead(orders, key="bad 1", topic="orders") == ["bad 1"]
    orders.connection.execute("UPDATE outbox.dead_letter SET dead_at = dead_at - interval '2 hours' WHERE attempts = 1")
    an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
    assert _dead(orders, since=an_hour_ago) == ["bad type"]
    assert _dead(orders, until=an_hour_ago) == ["bad 1", "bad 1", "bad 2"]


def test_discarded_ones_are_counted_and_gone_for_good(orders: ConsumptionBench) -> None:
    poison, *_ = publish(orders, "bad 1", "bad 2", "bad 3", "good")
    consume(orders)
    assert discard(orders.run, "g", LetterSelection(message_ids=[poison.message_id])) == 1
    assert discard(orders.run, "g", LetterSelection(error="bad 2")) == 1
    assert discard(orders.run, "g", LetterSelection(error="bad 2")) == 0, "once"
    group = group_of(orders)
    assert (group.handled, group.dead, group.discarded) == (1, 1, 2)
    found = trace(orders.run, poison.message_id)
    assert found is not None
    assert [(letter.discarded_at is not None, letter.replayed_at) for letter in found.dead_letters] == [(True, None)]
    letters = list_dead_letters(orders.run, "g", settled=True)
    # Several threads have handled them, so the times decide which one is the newest.
    assert sorted(letter.key for letter in letters) == ["bad 1", "bad 2", "bad 3"]
    times = [letter.dead_at for letter in letters]
    assert times == sorted(times, reverse=True)
    assert replay(orders.run, "g") == 1, "the one that is left"
    orders.sequence()
    consume(orders)
    assert _dead(orders) == ["bad 3"]
    age(orders, 4)
    clean(orders)
    assert keys(orders) == ["bad 3"]
    assert group_of(orders).discarded == 2


def test_a_discarded_one_that_fails_again_after_a_rewind_is_a_dead_letter_again(orders: ConsumptionBench) -> None:
    publish(orders, "bad 1")
    consume(orders)
    discard(orders.run, "g", LetterSelection())
    reset(orders.run, "g", "orders", Start.EARLIEST)
    consume(orders)
    assert _dead(orders) == ["bad 1"]
    group = group_of(orders)
    assert (group.queued, group.dead, group.discarded) == (2, 1, 1)


def test_what_is_stuck_does_not_block_retention_behind_it(orders: ConsumptionBench) -> None:
    """More dead letters than a batch has rows, and behind them one that is settled."""
    publish(orders, *(f"bad {n}" for n in range(7)), "bad and settled", "good")
    consume(orders)
    age(orders, 4)
    clean(orders, batch=3)
    assert len(keys(orders)) == 8
    discard(orders.run, "g", LetterSelection(key="bad and settled"))
    clean(orders, batch=3)
    assert keys(orders) == [f"bad {n}" for n in range(7)]
    discard(orders.run, "g", LetterSelection())
    clean(orders, batch=3)
    assert keys(orders) == []
    assert group_of(orders).discarded == 8


def test_what_waits_in_a_retry_queue_is_kept(orders: ConsumptionBench) -> None:
    publish(orders, "bad 1", "bad 2")
    consume(orders)
    age(orders, 4)
    replay(orders.run, "g", LetterSelection(key="bad 1"))
    clean(orders)
    assert keys(orders) == ["bad 1", "bad 2"], "scheduled, dead"
    orders.sequence()
    clean(orders)
    assert keys(orders) == ["bad 1", "bad 2"], "queued for retry, dead"
    consume(orders)
    discard(orders.run, "g", LetterSelection())
    clean(orders)
    assert keys(orders) == []


def test_a_letter_that_arrives_during_a_replay_waits_for_the_next_one(
    orders: ConsumptionBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of a topic for which the group has no retry queue yet."""
    orders.declare("points", queues=1)
    publish(orders, "bad 1")
    publish(orders, "bad 2", topic="points")
    consume(orders)
    consume(orders, topic="points")
    hidden = orders.rows("DELETE FROM outbox.dead_letter d USING outbox.commit_log l WHERE l.log_id = d.log_id"
                         " AND key = 'bad 2' RETURNING d.group_id, d.log_id")[0]  # fmt: skip
    ensure = registration.ensure_retry_queue

    def meanwhile(run: Executor, group_id: int, topic_id: int) -> int:
        with orders.database.connect() as other:
            other.execute(
                "INSERT INTO outbox.dead_letter (group_id, log_id, attempts, error) VALUES (%s, %s, 1, 'E: x')", hidden
            )
        return ensure(run, group_id, topic_id)

    monkeypatch.setattr(registration, "ensure_retry_queue", meanwhile)
    assert replay(orders.run, "g") == 1
    assert _dead(orders) == ["bad 2"]
    monkeypatch.undo()
    assert replay(orders.run, "g") == 1
