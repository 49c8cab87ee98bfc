"""Failed messages: retry levels and counts, dead letters, replay, timeouts, undecodable bodies, local retry."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

import psycopg
import pytest

from outbox.broker.database.executor import Executor
from outbox.broker.database.notify import Channel, notify
from outbox.broker.groups import send_back
from outbox.broker.groups.leases import QueueKey
from outbox.broker.groups.send_back import Failure, describe
from outbox.broker.operations import changes, dead_letters, progress
from outbox.errors import ConfigurationError, PartialFailure, PermanentError, RetryLater
from outbox.message import Delivery, Message
from outbox.retry import RetryPolicy
from outbox.subscription import Mode, OnError, Subscription
from outbox.utils import faults
from outbox.utils.safe_text import LONGEST_TEXT
from tests.broker.bench import AT_ONCE, ConsumptionBench, encode
from tests.support import eventually

LATER = RetryPolicy(delays_seconds=[10, 30, 60], max_attempts=16)


@pytest.fixture
def orders(bench: ConsumptionBench) -> ConsumptionBench:
    bench.declare("orders")
    return bench


@pytest.fixture
def armed() -> Iterator[Any]:
    yield faults.arm
    faults.arm("")


def subscribe(**options: Any) -> Subscription:
    return Subscription(**{"group": "g", "topic": "orders", "retry": AT_ONCE, **options})


def message(n: int = 0, **fields: Any) -> Message:
    return Message(topic="orders", body=encode({"n": n}), **fields)


def scheduled(bench: ConsumptionBench) -> list[tuple[int, int]]:
    """(attempt, seconds until due) of what was sent back."""
    rows = bench.rows(
        "SELECT s.attempt, round(extract(epoch FROM s.due_at - f.failed_at))::integer"
        " FROM outbox.scheduled s JOIN outbox.failure f ON f.log_id = s.log_id AND f.attempt = s.attempt - 1"
        " ORDER BY s.log_id"
    )
    return [(attempt, seconds) for attempt, seconds in rows]


def make_due(bench: ConsumptionBench) -> None:
    bench.connection.execute("UPDATE outbox.scheduled SET due_at = now()")
    bench.sequence()


def test_retry_levels_and_counts_then_dead_letter(orders: ConsumptionBench) -> None:
    seen: list[tuple[int, str]] = []

    def fail(delivery: Delivery) -> None:
        seen.append((delivery.attempt, delivery.queue))
        raise ValueError(f"attempt {delivery.attempt}")

    policy = RetryPolicy(delays_seconds=[10, 30], max_attempts=4)
    one = message()
    orders.publish([one])
    waits = []
    for _ in range(4):
        orders.runtime((subscribe(retry=policy), fail)).run_once()
        waits += scheduled(orders)
        make_due(orders)
    assert [attempt for attempt, _ in seen] == [1, 2, 3, 4]
    assert [queue for _, queue in seen][1:] == ["%RETRY%g"] * 3
    assert waits == [(1, 10), (2, 30), (3, 30)]
    (letter,) = dead_letters.list_dead_letters(orders.run, "g")
    assert (letter.message_id, letter.attempts, letter.topic) == (one.message_id, 4, "orders")
    errors = dead_letters.failed_attempts(orders.run, "g", one.message_id)
    assert [(e.attempt, e.error.splitlines()[0]) for e in errors] == [
        (n, f"ValueError: attempt {n}") for n in (1, 2, 3, 4)
    ]
    assert "raised in fail" in errors[0].error
    orders.assert_conserved("g")


def test_an_error_names_the_line_of_the_application_and_none_of_outbox() -> None:
    """A handler's wrong call of outbox is raised in outbox. The control is an error without a line of the handler."""
    with pytest.raises(ConfigurationError) as found:
        RetryPolicy(max_attempts=0)
    assert "raised in test_an_error_names_the_line" in describe(found.value)
    found.value.__traceback__ = found.tb.tb_next
    assert describe(found.value) == f"ConfigurationError: {found.value}"


def test_the_line_of_a_long_error_is_kept() -> None:
    with pytest.raises(ValueError) as found:
        raise ValueError("x" * 5_000)
    text = describe(found.value)
    assert len(text) == LONGEST_TEXT and "x\n  raised in test_the_line_of_a_long_error_is_kept, " in text


def test_an_error_names_the_line_of_the_handler_and_none_of_a_library() -> None:
    """A database error is raised in the driver. The control is a library that is called without a handler."""
    with pytest.raises(TypeError) as found:
        psycopg.sql.SQL(1)  # type: ignore[arg-type]
    assert "raised in test_an_error_names_the_line_of_the_handler" in describe(found.value)
    found.value.__traceback__ = found.tb.tb_next
    assert "raised in __init__" in describe(found.value)


def test_sixteen_attempts_by_default() -> None:
    policy = Subscription(group="g", topic="orders").retry
    assert not policy.exhausted(15) and policy.exhausted(16)


def test_listener_chooses_the_level(orders: ConsumptionBench) -> None:
    def fail(delivery: Delivery) -> None:
        raise RetryLater(level=3)

    orders.publish([message()])
    orders.runtime((subscribe(retry=LATER), fail)).run_once()
    assert scheduled(orders) == [(1, 60)]


def test_reaction_per_error_type_the_most_specific_wins(orders: ConsumptionBench) -> None:
    errors = [KeyError("x"), LookupError("x"), ValueError("x")]

    def fail(delivery: Delivery) -> None:
        raise errors[delivery.body["n"]]

    orders.publish([message(n) for n in range(3)])
    on_error = {KeyError: OnError.RETRY, LookupError: OnError.DEAD_LETTER, ValueError: OnError.RETRY_LATER}
    orders.runtime((subscribe(retry=LATER, on_error=on_error), fail)).run_once()
    assert len(scheduled(orders)) == 2
    (letter,) = dead_letters.list_dead_letters(orders.run)
    assert letter.error.startswith("LookupError")


def test_stop_keeps_the_message_and_is_visible_until_resumed(orders: ConsumptionBench) -> None:
    orders.declare("single", queues=1)
    healthy = threading.Event()
    seen: list[int] = []

    def handle(delivery: Delivery) -> None:
        if delivery.body["n"] == 2 and not healthy.is_set():
            raise ConnectionError("the ledger is closed")
        seen.append(delivery.body["n"])

    subscription = subscribe(topic="single", mode=Mode.ORDERLY, on_error={ConnectionError: OnError.STOP})
    orders.publish([Message(topic="single", body=encode({"n": n})) for n in range(5)])
    with orders.running((subscription, handle)):

        def stopped() -> list[progress.QueueProgress]:
            return [queue for queue in progress.list_queues(orders.run, "g") if queue.stopped]

        (queue,) = eventually(stopped)
        assert queue.stopped is not None and "the ledger is closed" in queue.stopped
        eventually(lambda: [(queue.next_offset, queue.lag) for queue in stopped()] == [(2, 3)])
        assert seen == [0, 1]
        healthy.set()
        assert changes.resume(orders.run, "g") == 1
        eventually(lambda: seen == [0, 1, 2, 3, 4])
    assert not stopped()


def test_stopped_queue_stays_stopped_for_the_next_process(orders: ConsumptionBench) -> None:
    seen: list[int] = []

    def fail(delivery: Delivery) -> None:
        seen.append(delivery.body["n"])
        raise ConnectionError

    orders.declare("single", queues=1)
    orders.publish([Message(topic="single", body=encode({"n": n})) for n in range(3)])
    subscription = subscribe(topic="single", mode=Mode.ORDERLY, on_error={ConnectionError: OnError.STOP})
    orders.runtime((subscription, fail)).run_once()
    orders.runtime((subscription, fail)).run_once()
    assert seen == [0]


def test_undecodable_body_is_dead_lettered_with_a_clear_error(orders: ConsumptionBench) -> None:
    broken = Message(topic="orders", key="k", body=b"{not json")
    foreign = Message(topic="orders", key="k", body=b"\x00", content_type="application/x-unknown")
    orders.publish([broken, foreign, message(7, key="k")])
    for mode in Mode:
        seen: list[int] = []
        orders.run_until_idle(
            subscribe(group=str(mode), mode=mode), lambda delivery, seen=seen: seen.append(delivery.body["n"])
        )
        letters = {letter.message_id: letter for letter in dead_letters.list_dead_letters(orders.run, str(mode))}
        assert "not valid application/json" in letters[broken.message_id].error
        assert "no codec for content type 'application/x-unknown'" in letters[foreign.message_id].error
        assert seen == [7]


def test_replay_from_dlq_starts_a_new_series_of_attempts(orders: ConsumptionBench) -> None:
    healthy = False
    attempts: list[int] = []

    def handle(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        if not healthy:
            raise PermanentError("down")

    orders.publish([message(n) for n in range(3)])
    orders.run_until_idle(subscribe(), handle)
    letters = dead_letters.list_dead_letters(orders.run, "g")
    assert dead_letters.replay(orders.run, "g", dead_letters.LetterSelection(message_ids=[letters[0].message_id])) == 1
    orders.sequence()
    orders.run_until_idle(subscribe(), handle)
    assert len(dead_letters.list_dead_letters(orders.run, "g")) == 3
    healthy = True
    assert dead_letters.replay(orders.run, "g") == 3
    assert dead_letters.replay(orders.run, "g") == 0
    orders.sequence()
    orders.run_until_idle(subscribe(), handle)
    assert dead_letters.list_dead_letters(orders.run, "g") == []
    assert len(dead_letters.list_dead_letters(orders.run, "g", settled=True)) == 3
    assert attempts == [1] * 7
    orders.assert_conserved("g")


def test_send_back_fails_then_local_retry(orders: ConsumptionBench, armed: Any) -> None:
    """A message that cannot be sent back is not lost, and the offset does not pass it: it is tried here again."""
    attempts: list[int] = []

    def handle(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        if len(attempts) < 3:
            raise ValueError

    armed("consumer.before_send_back=raise@1")
    orders.publish([message()])
    with orders.running((subscribe(retry=LATER), handle)):
        eventually(lambda: len(attempts) == 2)
        eventually(lambda: orders.retrying() == 1)
    assert attempts == [1, 2]
    # The attempt whose send-back failed does not count against the policy's levels.
    assert [attempt for (attempt,) in orders.rows("SELECT attempt FROM outbox.scheduled")] == [1]
    assert orders.lag("g") == 0
    orders.assert_conserved("g")


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_failure_whose_answer_is_lost_is_recorded_again(
    orders: ConsumptionBench, monkeypatch: pytest.MonkeyPatch, is_dead: bool
) -> None:
    """If the handler were called again and succeeded, its message would be handled and a dead letter."""
    attempts: list[int] = []
    recordings: list[int] = []

    def handle(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        raise PermanentError if is_dead else ValueError

    def record(run: Executor, owner: UUID, failures: Sequence[Failure]) -> set[QueueKey]:
        kept = recorded(run, owner, failures)
        recordings.append(len(failures))
        if len(recordings) == 1:
            orders.rows("SELECT pg_terminate_backend(%s, 5000)", run.connection.info.backend_pid)
            run.connection.execute("SELECT 1")
        return kept

    recorded = send_back.record
    monkeypatch.setattr(send_back, "record", record)
    orders.publish([message()])
    with orders.running((subscribe(retry=LATER), handle)):
        eventually(lambda: orders.rows("SELECT sum(dead + sent_back) FROM outbox.offset_v1") == [(1,)])
    assert (attempts, recordings) == ([1], [1, 1])
    assert len(dead_letters.list_dead_letters(orders.run)) == is_dead
    assert orders.retrying() == (not is_dead)
    orders.assert_conserved("g")


@pytest.mark.parametrize("mode", list(Mode))
def test_partial_failure_of_a_batch_retries_the_failed_ones_only(orders: ConsumptionBench, mode: Mode) -> None:
    handled: Counter[int] = Counter()
    failed: Counter[int] = Counter()
    lock = threading.Lock()

    def handle(deliveries: Any) -> None:
        errors: dict[Any, Exception] = {}
        with lock:
            for delivery in deliveries:
                if delivery.body["n"] % 10 == 3 and delivery.attempt == 1:
                    failed[delivery.body["n"]] += 1
                    errors[delivery.message_id] = ValueError("odd one")
                else:
                    handled[delivery.body["n"]] += 1
        if errors:
            raise PartialFailure(errors)

    orders.publish([message(n, key=f"k{n}") for n in range(100)])
    subscription = subscribe(mode=mode, batch=25, suspend_seconds=0.02)
    with orders.sequencing(), orders.running((subscription, handle)):
        eventually(lambda: len(handled) == 100)
    assert set(handled.values()) == {1}
    assert failed == dict.fromkeys(range(3, 100, 10), 1)
    orders.assert_conserved("g")


def test_retry_queue_serves_several_topics_of_a_group(orders: ConsumptionBench) -> None:
    orders.declare("bills")
    seen: list[tuple[str, str, int]] = []

    def handler(name: str) -> Any:
        def handle(delivery: Delivery) -> None:
            if delivery.attempt == 1:
                raise ValueError
            seen.append((name, delivery.topic, delivery.body["n"]))

        return handle

    orders.publish([message(1), Message(topic="bills", body=encode({"n": 2}))])
    runtime = orders.runtime((subscribe(), handler("o")), (subscribe(topic="bills"), handler("b")))
    runtime.run_once()
    orders.sequence()
    runtime.run_once()
    assert sorted(seen) == [("b", "bills", 2), ("o", "orders", 1)]


def test_sent_back_message_wakes_the_sequencer(orders: ConsumptionBench) -> None:
    """A short delay is kept although the sequencer last looked when nothing was due."""
    at: list[float] = []

    def handle(delivery: Delivery) -> None:
        at.append(time.monotonic())
        if delivery.attempt == 1:
            raise ValueError

    policy = RetryPolicy(delays_seconds=[0.2])
    with orders.sequencing(), orders.running((subscribe(retry=policy), handle)):
        eventually(lambda: orders.members() == 1)
        orders.broker.send([message()])
        notify(Executor(orders.connection, "outbox"), Channel.DECIDED)
        eventually(lambda: len(at) == 2)
    assert at[1] - at[0] >= 0.2


def test_notes_of_messages_sent_back_are_read_once_while_another_session_holds_a_snapshot(
    bench: ConsumptionBench,
) -> None:
    """The index keeps what was removed for as long; reading all of it would make each failure slower than the last."""
    bench.declare("single", queues=1)
    passed = "SELECT max(next_offset) FROM outbox.consumer_offset"
    read = "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'finished_ahead_pkey'"

    def fail(delivery: Delivery) -> None:
        raise PermanentError(f"cannot read order {delivery.body['n']}")

    with psycopg.connect(bench.url) as holder:
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("SELECT pg_current_xact_id()")
        with bench.running((subscribe(topic="single", threads=1), fail)):
            for wave in range(1, 16):
                bench.publish([Message(topic="single", body=encode({"n": n})) for n in range(10)])
                bench.sequence()
                eventually(lambda wave=wave: bench.rows(passed) == [(10 * wave,)])  # type: ignore[misc]
    assert bench.rows("SELECT count(*) FROM outbox.dead_letter") == [(150,)]
    # A session reports its reads before it leaves pg_stat_activity, and ends some time after its client has gone.
    sessions = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE application_name = 'outbox-consumer' AND datname = current_database()"
    )
    eventually(lambda: bench.rows(sessions) == [(0,)])
    [(count,)] = bench.rows(read)
    assert 0 < count <= 2 * 150
