"""Claimed messages in the broker: dead letters, ordered modes, and a new life of the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from uuid import UUID

import pytest

from outbox.broker.log.recall import recall
from outbox.broker.operations import dead_letters
from outbox.broker.operations.audit import count_messages
from outbox.errors import PermanentError
from outbox.message import Delivery, Message
from outbox.ports import AnyHandler, ClaimedElsewhere, Disposition
from outbox.recall import RecallStatus
from outbox.subscription import Effects, Mode, Subscription
from outbox.utils import given_up
from outbox.utils.given_up import GivenUp
from tests.broker.bench import AT_ONCE, FIFO, ConsumptionBench, encode
from tests.support import eventually


class Claims:
    """Claims and an inbox in memory (ports.ClaimingInvoker)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: set[UUID] = set()
        self._done: set[UUID] = set()

    def __call__(
        self,
        subscription: Subscription,
        handler: AnyHandler,
        delivery: Delivery,
        claimed: Callable[[float], None],
        *,
        generation: int,
    ) -> Disposition | Exception | ClaimedElsewhere:
        with self._lock:
            if delivery.message_id in self._done:
                return Disposition.SKIPPED
            if delivery.message_id in self._held:
                return ClaimedElsewhere(0.2)
            self._held.add(delivery.message_id)
        try:
            claimed(30.0)
            handler(delivery)  # type: ignore[arg-type]
        except Exception as error:
            return error
        else:
            with self._lock:
                self._done.add(delivery.message_id)
            return Disposition.HANDLED
        finally:
            with self._lock:
                self._held.discard(delivery.message_id)


class Slow:
    """A handler that waits for the test, and then fails if the test says so. Messages with the key `quick` succeed."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.proceed = threading.Event()
        self.is_broken = False

    def __call__(self, delivery: Delivery) -> None:
        self.calls.append(delivery.key)
        if delivery.key == "quick":
            return
        assert self.proceed.wait(20)
        if self.is_broken:
            raise PermanentError("refused")


@pytest.fixture
def told() -> Iterator[list[GivenUp]]:
    """The dead letters that the listener of this process is told."""
    before, found = given_up.listener, list[GivenUp]()
    given_up.install(found.append)
    yield found
    given_up.install(before)


def subscribe(mode: Mode = Mode.CONCURRENT, topic: str = "orders") -> Subscription:
    return Subscription(group="g", topic=topic, mode=mode, effects=Effects.OUTSIDE, retry=AT_ONCE)


def claimed(bench: ConsumptionBench) -> int:
    return int(bench.rows("SELECT count(*) FROM outbox.scheduled WHERE claimed")[0][0])


def test_a_dead_letter_of_a_claimed_message_is_told(bench: ConsumptionBench, told: list[GivenUp]) -> None:
    """A recall comes too late for it."""
    bench.declare("orders")
    slow = Slow()
    slow.is_broken = True
    message = Message(topic="orders", key="a", body=encode({}))
    bench.publish([message])
    with bench.sequencing(), bench.running((subscribe(), slow), claim=Claims()):
        eventually(lambda: claimed(bench) == 1)
        assert [one.status for one in recall(bench.run, [message.message_id])] == [RecallStatus.DELIVERED]
        slow.proceed.set()
        eventually(lambda: told)
    assert [(one.group, one.key, one.attempts) for one in told] == [("g", "a", 1)]
    assert bench.rows("SELECT count(*) FROM outbox.dead_letter") == [(1,)]
    assert count_messages(bench.run).differences() == []


def test_a_replayed_message_of_an_ordered_mode_leaves_its_retry_queue(bench: ConsumptionBench) -> None:
    """A message of the retry queue has given up its order, so it blocks no other message."""
    bench.declare("steps", types=FIFO)
    slow = Slow()
    slow.is_broken = True
    slow.proceed.set()
    bench.publish([Message(topic="steps", key="a", body=encode({}))])
    with bench.sequencing(), bench.running((subscribe(Mode.KEY_ORDERED, "steps"), slow), claim=Claims()):
        eventually(lambda: bench.rows("SELECT count(*) FROM outbox.dead_letter") == [(1,)])
        slow.proceed.clear()
        slow.is_broken = False
        assert dead_letters.replay(bench.run, "g") == 1
        eventually(lambda: claimed(bench) == 1)
        counted = count_messages(bench.run)
        totals = counted.groups["g"]
        assert (totals.lag, totals.claimed, totals.retrying, counted.differences()) == (0, 1, 0, [])
        slow.proceed.set()
        eventually(lambda: count_messages(bench.run).groups["g"].claimed == 0)
        eventually(lambda: bench.lag("g") == 0 and bench.retrying() == 0)
    assert slow.calls == ["a", "a"]


def test_a_result_from_before_a_new_life_changes_no_row(bench: ConsumptionBench) -> None:
    """After a restore, the log id of the claimed message may belong to another message."""
    bench.declare("orders")
    slow = Slow()
    slow.is_broken = True
    bench.publish([Message(topic="orders", key="a", body=encode({}))])
    with bench.sequencing(), bench.running((subscribe(), slow), claim=Claims()):
        eventually(lambda: claimed(bench) == 1)
        # As at the start of a server.
        bench.connection.execute("TRUNCATE outbox.life_sign")
        bench.publish([Message(topic="orders", key="quick", body=encode({}))])
        # An epoch of a new life continues from the clock.
        stored = "SELECT 1 FROM outbox.consumer_offset WHERE epoch > 1000000000000 AND ordinal > 0"
        eventually(lambda: bench.rows(stored), within_seconds=30)
        slow.proceed.set()
    assert slow.calls[0] == "a" and bench.rows("SELECT 1 FROM outbox.dead_letter") == []
    # The row still delivers the first message again.
    assert claimed(bench) == 1
