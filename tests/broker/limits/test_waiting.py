"""A process with limits starts every message at last, and sleeps while no message can start."""

from __future__ import annotations

import time
from typing import NoReturn
from uuid import UUID, uuid4

import pytest
from psycopg.types.json import Jsonb

from outbox.broker.consumer.call import NOT_STARTED, HandlerCall
from outbox.broker.consumer.lanes import FetchedEntry
from outbox.broker.consumer.owned_queue import ConsumingGroup, OwnedQueue
from outbox.broker.consumer.scheduler import Caller, Scheduler
from outbox.broker.consumer.subscription_runner import SubscriptionRunner
from outbox.broker.groups.leases import Lease, lease_clock
from outbox.broker.groups.offsets import Position
from outbox.codec import Codecs
from outbox.contrib.limits import Limits, slots
from outbox.contrib.limits.limiter import Limiter
from outbox.message import Delivery, Message
from outbox.retry import RetryPolicy
from outbox.subscription import Mode, Subscription
from tests.broker.bench import FIFO, ConsumptionBench, encode
from tests.support import eventually


class Process:
    """The lane and the limiter of one subscription. Calls run until the test settles them."""

    def __init__(self, bench: ConsumptionBench, limits: Limits, **options: object) -> None:
        values = {"group": "g", "topic": "orders", "threads": 4, **options}
        group = ConsumingGroup(1, "g", broadcast=False)
        self.subscribed = group.subscribe(Subscription(options=[limits], **values), _nothing, 1)  # type: ignore[arg-type]
        self.queue = OwnedQueue(
            Lease((1, 1), 1, lease_clock() + 600, UUID(int=0)), group, self.subscribed, "orders/0", Position(0, 0)
        )
        self.runner = SubscriptionRunner(self.subscribed, Scheduler([self.subscribed.subscription], _never).lock)
        assert isinstance(self.runner.admission, Limiter)
        self.limiter = self.runner.admission
        self._run, self._instance, self._offset = bench.run, uuid4(), 0

    def offer(self, *keys: str, ends_at: float | None = None) -> None:
        items = [FetchedEntry(self.queue, self._offset + n, 0, key, ()) for n, key in enumerate(keys)]
        for item in items:
            item.ends_at = ends_at
        self._offset += len(keys)
        self.runner.lane.offer(items)

    def step(self, *, may_start: bool = True) -> list[HandlerCall]:
        """Do what the dispatching thread does in a step, without handler threads. Return the started calls."""
        now = time.monotonic()
        self.limiter.prepare(self._run, self._instance, now, term_seconds=60, may_start=may_start)
        now = time.monotonic()
        calls = []
        while may_start and self.runner.admits(now) and (items := self.runner.lane.take(now)):
            self.limiter.spend(items, now)
            self.runner.calls.in_hand += 1
            calls.append(HandlerCall(self.subscribed, self.runner.lane, items))
        return calls

    def freeze(self) -> None:
        """Let the slots expire, as if the process had been frozen for longer than the lease term."""
        assert self.subscribed.admission_lease is not None
        self.subscribed.admission_lease.trusted_until = 0.0
        self.limiter._renew_at = self.limiter._slots_at = 0.0
        self._run.connection.execute("UPDATE outbox.slot SET expires_at = '-infinity'")

    def settle(self, call: HandlerCall) -> None:
        self.runner.calls.in_hand -= 1
        call.lane.end(call.items, [])

    @property
    def sleeps(self) -> bool:
        """Whether the dispatching thread would wait now."""
        now = time.monotonic()
        times = [self.limiter.next_at(now), self.runner.next_at(now)]
        return all(at is None or at > now for at in times)


def _nothing(_: Delivery) -> None:
    pass


def _never(*_: object) -> None:
    raise AssertionError("the test starts no thread")


@pytest.mark.parametrize("mode", [Mode.ORDERLY, Mode.KEY_ORDERED])
@pytest.mark.parametrize("limits", [Limits(running=2), Limits(rate="1000/s")])
def test_a_failed_message_starts_again_after_the_process_has_given_its_slots_back(
    bench: ConsumptionBench, mode: Mode, limits: Limits
) -> None:
    """Failed messages wait in the process. No other message arrives that would make the process take slots."""
    attempts: list[int] = []

    def handle(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        if delivery.attempt == 1:
            raise ValueError("no")

    bench.declare("orders", queues=1, types=FIFO)
    bench.publish([Message(topic="orders", key="a", body=encode({"n": 0}))])
    subscription = Subscription(
        group="g", topic="orders", mode=mode, options=[limits], retry=RetryPolicy(delays_seconds=[3.0])
    )
    with bench.running((subscription, handle)):
        eventually(lambda: attempts == [1, 2], within_seconds=30)


@pytest.mark.parametrize("limits", [Limits(running=2), Limits(per_key=1), Limits(rate="1000/s")])
def test_a_paused_subscription_sleeps_and_holds_no_slots(bench: ConsumptionBench, limits: Limits) -> None:
    process = Process(bench, limits)
    process.offer(*"abcdefgh")
    for call in process.step():
        process.settle(call)
    process.offer(*"abcdefgh")
    eventually(lambda: not process.step(may_start=False) and not bench.rows("SELECT 1 FROM outbox.slot_demand"))
    assert bench.rows("SELECT 1 FROM outbox.slot") == []
    assert process.limiter.next_at(time.monotonic()) is None
    assert eventually(process.step)


def test_messages_that_wait_for_their_key_use_no_tokens_and_no_threads(bench: ConsumptionBench) -> None:
    process = Process(bench, Limits(running=4, per_key=1, rate="1000/s", burst=5))
    process.offer(*["a"] * 10)
    # The first token is due at once, but maybe after the time with which the step began.
    assert len(eventually(process.step)) == 1
    before = bench.rows("SELECT next_at FROM outbox.bucket")
    for _ in range(20):
        assert process.step() == []
        assert process.sleeps
    assert bench.rows("SELECT next_at FROM outbox.bucket") == before
    eventually(lambda: process.step() == [] and bench.rows("SELECT 1 FROM outbox.slot_demand WHERE wanted = 1"))


def test_tokens_of_a_batch_are_taken_although_no_message_waits(bench: ConsumptionBench) -> None:
    process = Process(bench, Limits(rate="10/s"), batch=50, mode=Mode.CONCURRENT)
    process.offer(*[""] * 50)
    [call] = eventually(process.step)
    assert len(call.items) == 50
    process.step()
    [(tokens,)] = bench.rows("SELECT extract(epoch FROM next_at - clock_timestamp()) * 10 FROM outbox.bucket")
    assert 40 < tokens <= 50


def test_a_process_takes_no_more_tokens_ahead_than_it_uses(bench: ConsumptionBench) -> None:
    """Unused tokens lapse. If the process of a quiet queue took them, the process of a busy queue would lack them."""
    process = Process(bench, Limits(rate="1000/s", burst=500))
    for _ in range(5):
        process.offer("a")
        [call] = eventually(process.step)
        process.settle(call)
        assert bench.rows("SELECT granted <= 20 FROM outbox.bucket") == [(True,)]


def test_messages_past_their_time_limit_use_no_tokens(bench: ConsumptionBench) -> None:
    """If they did, a backlog of them would use up the rate, and no message would ever reach a handler in time."""
    process = Process(bench, Limits(rate="1/h"), batch=1)
    process.offer(*"abcdefgh", ends_at=time.monotonic() - 1)
    process.offer("i", ends_at=time.monotonic() + 3600)
    process.offer("j")
    calls = eventually(process.step)
    assert "".join(item.key for call in calls for item in call.items) == "abcdefghi"
    assert process.step() == []


@pytest.mark.parametrize("limits", [Limits(per_key=1), Limits(running=4)])
def test_a_call_whose_slot_is_lost_before_it_has_started_does_not_start(
    bench: ConsumptionBench, limits: Limits
) -> None:
    """Calls wait for a thread with their slots. After the slots have expired, other processes may hold them."""
    frozen, heir = Process(bench, limits), Process(bench, limits)
    frozen.offer(*"abcd")
    before = eventually(frozen.step)
    frozen.freeze()
    heir.offer(*"abcd")
    assert len(eventually(heir.step)) == 4
    frozen.offer("z")
    frozen.step()
    lease = frozen.subscribed.admission_lease
    assert lease is not None and lease.trusted()
    assert not any(lease.admits(call.admission_epoch) for call in before)
    caller = Caller(_fails, Codecs(), lambda call: None)
    for call in before:
        caller.run(call, None)
        assert call.results == [NOT_STARTED]
    assert lease.admits(HandlerCall(frozen.subscribed, frozen.runner.lane, before[0].items).admission_epoch)


def _fails(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a handler was called without a slot")


def test_a_higher_rate_takes_effect_although_the_next_token_was_due_in_a_day(bench: ConsumptionBench) -> None:
    process = Process(bench, Limits(rate="1/day"))
    process.offer("a")
    assert len(eventually(process.step)) == 1
    process.offer(*"bcdef")
    process.step()
    assert process.sleeps
    slots.declare(bench.run, (1, 1), Limits(rate="1/day"))
    bench.connection.execute("UPDATE outbox.subscription_limit SET override = %s", [Jsonb({"rate": "100/s"})])
    started: list[HandlerCall] = []

    def all_started() -> bool:
        started.extend(process.step())
        return len(started) == 5

    eventually(all_started)


def test_a_changed_rate_keeps_the_number_of_tokens_that_are_used_already(bench: ConsumptionBench) -> None:
    place = (1, 1)
    assert len(slots.take_tokens(bench.run, place, 0, per_second=1.0, burst=1, used=100)) == 0
    [token] = slots.take_tokens(bench.run, place, 1, per_second=10.0, burst=1)
    assert 5 < token - time.monotonic() <= 10
    [token] = slots.take_tokens(bench.run, place, 1, per_second=1.0, burst=1)
    assert 50 < token - time.monotonic() <= 101


def test_a_lower_limit_of_a_key_holds_for_the_next_call(bench: ConsumptionBench) -> None:
    process = Process(bench, Limits(per_key=3))
    process.offer(*["a"] * 6)
    calls = eventually(process.step)
    assert len(calls) == 3
    slots.declare(bench.run, (1, 1), Limits(per_key=3))
    bench.connection.execute("UPDATE outbox.subscription_limit SET override = %s", [Jsonb({"per_key": 1})])
    eventually(lambda: not process.step() and process.limiter.limits.per_key == 1)
    # If a running call gave its slot up, another process could start a call beside it after a second change.
    assert bench.rows("SELECT count(*) FROM outbox.slot") == [(3,)]
    for call in calls[:2]:
        process.settle(call)
        assert process.step() == []
    process.settle(calls[2])
    [_] = process.step()
    eventually(lambda: not process.step() and bench.rows("SELECT number FROM outbox.slot") == [(1,)])
    bench.connection.execute("UPDATE outbox.subscription_limit SET override = %s", [Jsonb({"per_key": 2})])
    [_] = eventually(process.step)


@pytest.mark.parametrize(
    ("code", "override", "present"),
    [
        (Limits(running=5), {"burst": 7}, Limits(running=5)),
        (Limits(running=5), {"per_key": 2, "running": 3}, Limits(running=3)),
        (Limits(rate="5/s"), {"burst": 7, "running": 2}, Limits(rate="5/s", burst=7, running=2)),
        (Limits(rate="100/min", burst=500), {"rate": "1/day"}, Limits(rate="1/day", burst=366)),
        (Limits(rate="1/day"), {"burst": 500}, Limits(rate="1/day", burst=366)),
    ],
)
def test_an_override_that_is_older_than_the_code_does_not_stop_the_process(
    bench: ConsumptionBench, code: Limits, override: dict[str, object], present: Limits
) -> None:
    process = Process(bench, code)
    slots.declare(bench.run, (1, 1), code)
    bench.connection.execute("UPDATE outbox.subscription_limit SET override = %s", [Jsonb(override)])
    process.offer("a")
    assert eventually(process.step)
    assert process.limiter.limits == present


def test_a_process_declares_its_limits_again(bench: ConsumptionBench) -> None:
    """A process with older code may have started after this one, or the broker's database was restored."""
    process = Process(bench, Limits(running=5))
    slots.declare(bench.run, (1, 1), Limits(running=9))
    bench.connection.execute("UPDATE outbox.subscription_limit SET override = %s", [Jsonb({"running": 2})])
    process.offer("a")
    eventually(process.step)
    assert bench.rows("SELECT declared, override FROM outbox.subscription_limit") == [
        ({"running": 5, "burst": 1}, {"running": 2})
    ]


def test_slots_of_keys_stay_for_the_next_messages_and_go_to_a_process_that_waits(bench: ConsumptionBench) -> None:
    first, second = (Process(bench, Limits(per_key=1)) for _ in range(2))
    first.offer(*"abc")
    calls = eventually(first.step)
    for call in calls:
        first.settle(call)
    first.step()
    assert bench.rows("SELECT count(*) FROM outbox.slot") == [(3,)]
    second.offer("b")

    def handed_over() -> list[HandlerCall]:
        first.offer("x")
        for call in first.step():
            first.settle(call)
        return second.step()

    [call] = eventually(handed_over)
    assert call.items[0].key == "b"
