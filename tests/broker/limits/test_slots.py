"""The arithmetic of slots and tokens: random interleavings, several sessions at once, shares."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest

from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.database.executor import Executor
from outbox.contrib.limits import Limits, slots
from outbox.contrib.limits.slots import Demand, fair_share
from outbox.errors import ConfigurationError
from tests.broker.bench import ConsumptionBench
from tests.broker.support import in_threads
from tests.support import eventually

PLACE = (1, 1)
IDLE = Demand(wanted=0, in_use=0)


@pytest.fixture
def run(bench: ConsumptionBench) -> Iterator[Executor]:
    with closing(bench.database.open(name="test")) as connection:
        yield Executor(connection, "outbox")


def held(run: Executor) -> Counter[str]:
    rows = run.connection.execute("SELECT key FROM outbox.slot WHERE expires_at > clock_timestamp()").fetchall()
    return Counter(key for (key,) in rows)


def test_no_interleaving_exceeds_the_limit(run: Executor) -> None:
    """Instances take, release, renew, die and freeze. A frozen instance has forgotten what it may still hold."""
    chance = random.Random(0)
    instances = [uuid4() for _ in range(4)]
    known: dict[UUID, set[tuple[str, int]]] = {instance: set() for instance in instances}
    for _ in range(300):
        instance = chance.choice(instances)
        step = chance.choice(["take", "take", "release", "renew", "expire", "die"])
        if step == "take":
            wanted = {key: chance.randint(1, 3) for key in chance.sample(["", "a", "b"], 2)}
            taken = slots.take(run, PLACE, instance, wanted, limit=3, term_seconds=60)
            assert all(len(numbers) <= wanted[key] for key, numbers in taken.items())
            known[instance] |= {(key, number) for key, numbers in taken.items() for number in numbers}
        elif step == "release" and known[instance]:
            released = chance.sample(sorted(known[instance]), 1)
            slots.release(run, PLACE, instance, released)
            known[instance].difference_update(released)
        elif step == "renew":
            renewed = slots.renew(run, PLACE, instance, IDLE, term_seconds=60)
            assert renewed.numbers is not None
            found = {(key, number) for key, numbers in renewed.numbers.items() for number in numbers}
            # A renewal brings back only slots that no other instance has taken meanwhile.
            assert found <= known[instance]
            known[instance] = found
        elif step == "expire":
            run.connection.execute("UPDATE outbox.slot SET expires_at = '-infinity' WHERE instance_id = %s", [instance])
        elif step == "die":
            slots.release_all(run, instance)
            known[instance] = set()
        assert all(count <= 3 for count in held(run).values())
    holders = run.connection.execute("SELECT key, number, instance_id FROM outbox.slot").fetchall()
    assert {(instance, (key, number)) for key, number, instance in holders} <= {
        (instance, slot) for instance, slots in known.items() for slot in slots
    }


def test_free_numbers_between_held_ones_are_taken(run: Executor) -> None:
    holder, taker = uuid4(), uuid4()
    slots.take(run, PLACE, holder, {"": 6, "a": 1}, limit=10, term_seconds=60)
    slots.release(run, PLACE, holder, [("", 1), ("", 3), ("", 4)])
    run.connection.execute("UPDATE outbox.slot SET expires_at = '-infinity' WHERE number = 6")
    taken = slots.take(run, PLACE, taker, {"": 5, "b": 10}, limit=8, term_seconds=60)
    assert taken == {"": {1, 3, 4, 6, 7}, "b": set(range(1, 9))}
    assert slots.take(run, PLACE, taker, {"": 5}, limit=8, term_seconds=60) == {"": {8}}
    assert slots.take(run, PLACE, taker, {"": 5}, limit=8, term_seconds=60) == {}


def test_sessions_that_take_at_once_share_the_numbers(bench: ConsumptionBench, run: Executor) -> None:
    taken: list[int] = []
    start = threading.Barrier(4)

    def take(database: BrokerDatabase) -> None:
        with closing(database.open(name="taker")) as connection:
            other, instance = Executor(connection, "outbox"), uuid4()
            start.wait()
            for _ in range(50):
                numbers = slots.take(other, PLACE, instance, {"": 1}, limit=20, term_seconds=60).get("", set())
                taken.extend(numbers)

    in_threads([partial(take, bench.database)] * 4)
    assert sorted(taken) == list(range(1, 21))


FROZEN = uuid4()


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda run: slots.renew(run, PLACE, FROZEN, IDLE, term_seconds=60), id="renew"),
        pytest.param(lambda run: slots.release(run, PLACE, FROZEN, [("b", 1), ("a", 1)]), id="release"),
        pytest.param(lambda run: slots.release_all(run, FROZEN), id="release_all"),
        pytest.param(slots.forget_the_dead, id="forget_the_dead"),
    ],
)
def test_a_frozen_process_does_not_deadlock_with_the_one_that_takes_its_slots(
    bench: ConsumptionBench, run: Executor, act: Callable[[Executor], object]
) -> None:
    # On disk, "b" comes before "a".
    for key in ("b", "a"):
        slots.take(run, PLACE, FROZEN, {key: 1}, limit=1, term_seconds=-120)
    taker = uuid4()

    def thaw() -> None:
        with closing(bench.database.open(name="frozen")) as connection:
            act(Executor(connection, "outbox"))

    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    with ThreadPoolExecutor(1) as pool, closing(bench.database.open(name="watcher")) as watcher:
        with run.connection.transaction():
            assert slots.take(run, PLACE, taker, {"a": 1}, limit=1, term_seconds=60)
            thawed = pool.submit(thaw)
            eventually(lambda: thawed.done() or watcher.execute(waiting).fetchone() != (0,), what="the frozen process")
            assert slots.take(run, PLACE, taker, {"b": 1}, limit=1, term_seconds=60)
        thawed.result()
    assert held(run) == Counter("ab")


def test_sessions_that_take_tokens_at_once_get_each_token_once(bench: ConsumptionBench) -> None:
    """The times of the tokens are one per interval, in whatever order the sessions have taken them."""
    tokens: list[float] = []
    start = threading.Barrier(4)

    def take(database: BrokerDatabase) -> None:
        with closing(database.open(name="taker")) as connection:
            other = Executor(connection, "outbox")
            start.wait()
            for _ in range(25):
                tokens.extend(slots.take_tokens(other, PLACE, 1, per_second=100.0, burst=1))

    [(began,)] = bench.rows("SELECT clock_timestamp()")
    in_threads([partial(take, bench.database)] * 4)
    [(granted, next_at)] = bench.rows("SELECT extract(epoch FROM next_at - first_at) * 100, next_at FROM outbox.bucket")
    assert round(granted) == 1
    assert len(tokens) == 100
    # By the server's clock, because a session may read its own clock late. There is no upper bound: late sessions lose
    # tokens.
    assert next_at - began >= timedelta(seconds=1)


def test_shares_are_fair_and_use_every_slot() -> None:
    a, b, c = sorted(uuid4() for _ in range(3))
    assert [fair_share(10, {a: 8, b: 8, c: 8}, one, 0) for one in (a, b, c)] == [4, 3, 3]
    assert [fair_share(10, {a: 1, b: 8, c: 8}, one, 0) for one in (a, b, c)] == [1, 5, 4]
    assert [fair_share(10, {a: 0, b: 20, c: 1}, one, 0) for one in (a, b, c)] == [0, 9, 1]
    for rotation in range(3):
        assert sum(fair_share(1, {a: 8, b: 8, c: 8}, one, rotation) for one in (a, b, c)) == 1
    turns = [one for one in (a, b, c) for rotation in range(3) if fair_share(1, {a: 8, b: 8, c: 8}, one, rotation)]
    assert turns == [a, b, c]
    for seed in range(20):
        assert_fair(random.Random(seed))


def assert_fair(chance: random.Random) -> None:
    """Random shares never exceed the limit, and each process that wants slots gets some."""
    wanted = {uuid4(): chance.randint(0, 9) for _ in range(chance.randint(1, 6))}
    limit = chance.randint(1, 20)
    for rotation in range(len(wanted)):
        shares = {one: fair_share(limit, wanted, one, rotation) for one in wanted}
        assert sum(shares.values()) == min(limit, sum(wanted.values()))
        assert all(shares[one] <= wanted[one] for one in wanted)
    for one in wanted:
        shares_over_time = [fair_share(limit, wanted, one, rotation) for rotation in range(60)]
        assert wanted[one] == 0 or any(shares_over_time)


# -- limits that PostgreSQL cannot hold are refused where they are declared --


def test_a_number_that_the_tables_cannot_hold_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        *(
            ({name: 2**31, "rate": "9/s"}, rf"{name}=2147483648.*2,147,483,647")
            for name in ("running", "per_key", "burst")
        ),
        ({"rate": "1000001/s"}, "1,000,000/s"),
        ({"rate": f"{'9' * 400}/s"}, "1,000,000/s"),
        ({"rate": "0.001/day"}, "366 days"),
        ({"rate": "1/day", "burst": 367}, "366 days"),
    ]
    for given, complaint in refused:
        with pytest.raises(ConfigurationError, match=complaint):
            Limits(**given)


def test_the_tables_hold_the_extreme_limits(bench: ConsumptionBench) -> None:
    for place, limits in enumerate(
        [Limits(rate="1/day", burst=366), Limits(rate="1000000/s"), Limits(rate="1000000/s", burst=2**31 - 1)]
    ):
        assert limits.per_second is not None
        for _ in range(2):
            taken = slots.take_tokens(bench.run, (1, place), 1, per_second=limits.per_second, burst=limits.burst)
            assert len(taken) == 1, limits
    taken_slots = slots.take(bench.run, PLACE, uuid4(), {"": 2}, limit=2**31 - 1, term_seconds=60)
    assert taken_slots == {"": {1, 2}}
