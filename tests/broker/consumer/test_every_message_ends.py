"""Everything at once, on both paths: retries, poison, lost ends, replays, recalls, processes killed again and again.

Every message ends; a harmless one is never a dead letter; the keys of a FIFO topic keep the order of local commits;
a recalled message has no effect; every equation of conservation holds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest

from outbox.broker import deaths
from outbox.broker.database.executor import Executor
from outbox.broker.log import commit_log
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.operations import dead_letters
from outbox.broker.operations.audit import count_messages
from outbox.broker.postgres import PostgresBroker
from outbox.broker.supervisor import ChildSpec, Supervisor
from outbox.checkback import CheckBack
from outbox.message import Message
from outbox.recall import RecallStatus
from outbox.transaction import Answer, Check, CheckSettings, Decision, EndTransaction, HalfTransaction
from outbox.utils.backoff import Backoff
from outbox.utils.ids import uuid7
from tests.broker.bench import FIFO, NORMAL, ROOT, ConsumptionBench, assert_each_once_in_order, encode
from tests.support import eventually

INNOCENT = ("fine", "fine", "fine", "fails", "slow")
# These must end as dead letters, and no others may.
GUILTY = ("poison", "exit", "hang")
CONSUMERS = ("c1", "c2")
WORKERS = {
    "group": "workers",
    "topic": "orders",
    "batch": 5,
    "timeout_seconds": 3.0,
    "delays_seconds": [0.05, 0.1],
    "max_attempts": 4,
}
ORDERED = {"group": "ordered", "topic": "steps", "suspend_seconds": 0.05}
# Half of what happens are kills of consumers.
KINDS = [*["kill a consumer"] * 4, "stop a consumer", "kill the broker", "replay", "recall"]
SOON = Backoff(first_seconds=0.05, longest_seconds=0.2)
GROUP = "storm"
LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"
CHECKS = CheckSettings(immunity_seconds=1, recheck_seconds=0.5, max_checks=1000)
NEXT = (
    "INSERT INTO business (topic, key, n, message_id, fate)"
    " SELECT %(topic)s, %(key)s, coalesce(max(n) + 1, 0), %(id)s, %(fate)s FROM business"
    " WHERE topic = %(topic)s AND key = %(key)s RETURNING n"
)


class BusinessChecker:
    """Answers by the business table. The key's lock, held to the end of the local transaction, is the barrier."""

    def __init__(self, url: str) -> None:
        self._url = url

    def check_local_transactions(self, checks: Sequence[Check]) -> Iterator[Answer]:
        with psycopg.connect(self._url, autocommit=True) as connection:
            for check in checks:
                with connection.transaction():
                    connection.execute(LOCK, [check.message.key])
                    found = connection.execute(
                        "SELECT 1 FROM business WHERE message_id = %s", [check.transaction_id]
                    ).fetchone()
                decision = Decision.COMMIT if found else Decision.ROLLBACK
                yield Answer(transaction_id=check.transaction_id, decision=decision)


class Producer:
    """Publishes local transactions with one message each, which commit or roll back."""

    def __init__(self, storm: Storm, seed: int) -> None:
        self._storm, self._chance = storm, random.Random(seed)
        self.local = psycopg.connect(storm.bench.url, autocommit=True)
        self._catalog = TopicCatalog()
        self.published = self.rolled_back = 0

    def publish(self, *, guilty: bool = False) -> None:
        chance = self._chance
        topic, fate = chance.choice(["orders", "steps"]), chance.choice(INNOCENT)
        if guilty and self.published % self._storm.guilty_every == 0:
            topic, fate = "orders", GUILTY[self.published // self._storm.guilty_every % len(GUILTY)]
        self.published += 1
        delay = chance.choice([0.0, 0.0, 0.3, 60.0]) if topic == "orders" and fate not in GUILTY else 0.0
        commits = fate in GUILTY or chance.random() < 0.8
        message_id, key = uuid7(), f"k{chance.randrange(8)}"
        with self.local.transaction(force_rollback=not commits):
            self.local.execute(LOCK, [key])
            row = self.local.execute(NEXT, {"topic": topic, "key": key, "id": message_id, "fate": fate}).fetchone()
            assert row is not None
            message = Message(
                topic=topic,
                key=key,
                message_id=message_id,
                body=encode({"n": row[0], "do": fate}),
                deliver_at=datetime.now(UTC) + timedelta(seconds=delay) if delay else None,
            )
            self._store(message)
        if not self._storm.atomic and chance.random() < 0.95:
            decision = Decision.COMMIT if commits else Decision.ROLLBACK
            end = EndTransaction(transaction_id=message.message_id, decision=decision, producer_group=GROUP)
            self._storm.broker.end([end], timeout_seconds=30)
        self.rolled_back += not commits
        if commits and delay > 1:
            self._storm.waiting.append(message_id)

    def publish_until(self, stop: threading.Event) -> None:
        while not stop.wait(0.05):
            self.publish()

    def _store(self, message: Message) -> None:
        if self._storm.atomic:
            run = Executor(self.local, "outbox")
            commit_log.append_decided(run, self._catalog, [message], producer_group=GROUP, transactional=True)
        else:
            half = HalfTransaction(producer_group=GROUP, messages=[message])
            self._storm.broker.send_half(half, timeout_seconds=30)


@dataclass
class Storm:
    """One run. All that is random comes from `seed`; when processes die is up to the machine."""

    bench: ConsumptionBench
    atomic: bool
    seed: int
    guilty_every: int
    recalled: set[UUID] = field(default_factory=set)
    waiting: list[UUID] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.broker = PostgresBroker(self.bench.database, check=CHECKS)
        self.check_back = CheckBack(self.broker, GROUP, BusinessChecker(self.bench.url))
        self.producers = [Producer(self, self.seed + number) for number in range(2)]

    def close(self) -> None:
        for producer in self.producers:
            producer.local.close()
        self.broker.close()

    # -- faults while it runs -- -----------------------------------------------------------------

    def something(self, what: str, supervisor: Supervisor) -> None:
        self.happened[what] += 1
        if what == "replay":
            dead_letters.replay(self.bench.run, "workers")
        elif what == "recall":
            self.recall(self.waiting[-1:])
        else:
            victim = "broker" if what == "kill the broker" else self.chance.choice(CONSUMERS)
            number = signal.SIGTERM if what == "stop a consumer" else signal.SIGKILL
            os.kill(eventually(lambda: supervisor.pids().get(victim, 0), what=f"{victim} runs"), number)

    def progress(self, before: int) -> int:
        """How many effects there are, 0 while there are no more than before."""
        self.check_back.run_once()
        found = self.bench.effect_count()
        return found if found > before else 0

    def recall(self, ids: list[UUID]) -> bool:
        """Whether no message waits any more. Halves that lost their end message are checked first."""
        self.check_back.run_once()
        outcomes = self.broker.recall(ids, timeout_seconds=30)
        self.recalled.update(one.message_id for one in outcomes if one.status is RecallStatus.RECALLED)
        return all(one.is_recalled or one.status is RecallStatus.DELIVERED for one in outcomes)

    def rage(self, count: int, every: int, supervisor: Supervisor) -> None:
        """Publish, and let each kind of thing happen before the first of them happens again.

        Another producer publishes until the last of them. A consumer that is stopped leaves, and joins again.
        """
        todo: list[str] = []
        done = 0
        first, beside = self.producers
        stop = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(beside.publish_until, stop)
            try:
                for number in range(1, count + 1):
                    first.publish(guilty=True)
                    if number % every == 0:
                        # Between two things some work is done, or it would all happen to processes that start.
                        done = eventually(lambda before=done: self.progress(before), within_seconds=60)  # type: ignore[misc]
                        todo = todo or self.chance.sample(KINDS, len(KINDS))
                        self.something(todo.pop(), supervisor)
            finally:
                stop.set()
            publishing.result(60)
        assert set(self.happened) == set(KINDS)

    # -- the end --------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Whether every message has ended."""
        self.check_back.run_once()
        counted = count_messages(self.bench.run)
        topics, groups = counted.topics.values(), counted.groups.values()
        on_the_way = sum(t.undecided + t.parked + t.unsequenced + t.held + t.scheduled for t in topics)
        return bool(on_the_way + sum(group.lag + group.retrying for group in groups) == 0)

    def check(self) -> None:
        rows = self.bench.rows("SELECT topic, key, n, message_id, fate FROM business")
        committed = {message_id: (topic, fate) for topic, _, _, message_id, fate in rows}
        guilty = {one for one, (_, fate) in committed.items() if fate in GUILTY}
        effects = Counter(row[0] for row in self.bench.rows("SELECT message_id FROM effect"))
        letters = Counter(letter.message_id for letter in dead_letters.list_dead_letters(self.bench.run, limit=10_000))
        assert effects == Counter(committed.keys() - guilty - self.recalled), "each harmless message takes effect once"
        assert letters == Counter(guilty - self.recalled), "the poison messages are dead letters, and no others"
        steps = [row for row in self.bench.effects() if committed[row[3]][0] == "steps"]
        assert_each_once_in_order(steps, sum(topic == "steps" for topic, _ in committed.values()))
        assert count_messages(self.bench.run).differences() == []
        assert {fate for _, fate in committed.values()} == {*INNOCENT, *GUILTY}
        assert self.recalled and all(one.rolled_back for one in self.producers)
        if not self.atomic:
            decided = self.bench.rows("SELECT count(*) FROM outbox.op_log WHERE decided_by = 'K'")
            assert decided > [(0,)], "check-back decides what lost its end message"


@contextlib.contextmanager
def supervised(bench: ConsumptionBench, mode: str) -> Iterator[Supervisor]:
    """A broker process and two consumers, restarted when they die; `mode` is that of the FIFO topic's group."""
    environment = {"PYTHONPATH": str(ROOT)}
    specs = [ChildSpec(name="broker", argv=[sys.executable, "-m", "outbox.broker", "--database", bench.url])]
    for name in CONSUMERS:
        subscriptions = [WORKERS, {**ORDERED, "mode": mode}]
        argument = json.dumps({"url": bench.url, "name": name, "log": "CRITICAL", "subscriptions": subscriptions})
        argv = [sys.executable, "-m", "tests.broker.consumer.consumer_process", argument]
        record = functools.partial(deaths.record, bench.database)
        specs.append(ChildSpec(name=name, argv=argv, environment=environment, on_death=record))
    supervisor = Supervisor(specs, backoff=SOON)
    supervisor.start()
    try:
        yield supervisor
    finally:
        supervisor.stop()


def every_message_ends(
    bench: ConsumptionBench, mode: str, *, atomic: bool, seed: int, count: int, every: int, guilty: int
) -> None:
    bench.declare("orders", queues=3, types=NORMAL)
    bench.declare("steps", queues=3, types=FIFO)
    bench.connection.execute(
        "CREATE TABLE business (topic text, key text, n integer, message_id uuid UNIQUE, fate text,"
        " PRIMARY KEY (topic, key, n))"
    )
    with (
        contextlib.closing(Storm(bench, atomic, seed, count // guilty)) as storm,
        supervised(bench, mode) as supervisor,
    ):
        eventually(lambda: bench.members() == 2 * len(CONSUMERS), within_seconds=60, what="both groups are there")
        storm.rage(count, every, supervisor)
        # Then the run need not wait for a message that was delayed by a minute.
        eventually(lambda: storm.recall(storm.waiting), within_seconds=120, what="all that waits is recalled")
        eventually(storm.is_over, within_seconds=180, what="every message ends")
        storm.check()
        assert dead_letters.replay(bench.run, "workers") > 0
        eventually(storm.is_over, within_seconds=120, what="every message ends again")
        storm.check()


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["orderly", "key_ordered"])
@pytest.mark.parametrize("path", ["two_phase", pytest.param("atomic", marks=pytest.mark.soak)])
def test_every_message_ends(bench: ConsumptionBench, path: str, mode: str) -> None:
    every_message_ends(bench, mode, atomic=path == "atomic", seed=1, count=121, every=15, guilty=3)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("path", ["two_phase", "atomic"])
def test_every_message_ends_many_times(bench: ConsumptionBench, path: str, seed: int) -> None:
    mode = ("orderly", "key_ordered")[seed % 2]
    every_message_ends(bench, mode, atomic=path == "atomic", seed=100 + seed, count=1_000, every=60, guilty=8)
