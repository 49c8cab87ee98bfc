"""Everything at once on a FIFO topic: random commits, lost ends, and consumers that join, leave and are killed.

Per key the order of local commits holds, nothing is lost, nothing is invented, and no effect happens twice.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import psycopg
import pytest

from outbox.broker.postgres import PostgresBroker
from outbox.checkback import CheckBack
from outbox.transaction import Answer, Check, Decision
from tests.broker.bench import FIFO, ROOT, ConsumptionBench, assert_each_once_in_order
from tests.broker.consumer.storm_producer import CHECKS, GROUP, LOCK
from tests.support import eventually

MOST_CONSUMERS = 4


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


class Storm:
    """Producers and consumers as processes, and what happens to the consumers."""

    def __init__(self, bench: ConsumptionBench, mode: str, *, seed: int) -> None:
        self.bench, self.mode = bench, mode
        self.chance = random.Random(seed)
        self.consumers: list[subprocess.Popen[bytes]] = []
        self.happened: dict[str, int] = {"joined": 0, "left": 0, "killed": 0}
        self._broker = PostgresBroker(bench.database, check=CHECKS)
        self._check_back = CheckBack(self._broker, GROUP, BusinessChecker(bench.url))

    def produce(self, producers: int, count: int, keys: int) -> list[subprocess.Popen[bytes]]:
        return [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.broker.consumer.storm_producer",
                    json.dumps({"url": self.bench.url, "count": count, "keys": keys, "seed": seed}),
                ],
                cwd=ROOT,
            )
            for seed in range(producers)
        ]

    def join(self) -> None:
        name = f"c{self.happened['joined']}"
        self.consumers.append(self.bench.spawn(name, mode=self.mode, lease_seconds=1.5))
        self.happened["joined"] += 1

    def leave(self, consumer: subprocess.Popen[bytes]) -> None:
        # A process that gets the signal before it handles signals dies of it: it has not joined yet.
        assert self.bench.stop(consumer) in (0, -signal.SIGTERM)

    def something(self) -> None:
        """One consumer joins, leaves or is killed."""
        if len(self.consumers) < 2:
            self.join()
            return
        what = self.chance.choice(["join", "leave", "kill", "kill"])
        if what == "join" and len(self.consumers) < MOST_CONSUMERS:
            self.join()
            return
        victim = self.consumers.pop(self.chance.randrange(len(self.consumers)))
        if what == "leave":
            self.leave(victim)
            self.happened["left"] += 1
        else:
            victim.kill()
            victim.wait()
            self.happened["killed"] += 1

    def rage(self, producers: Sequence[subprocess.Popen[bytes]], every_seconds: float) -> None:
        """Until the producers are done."""
        pause = threading.Event()
        while any(producer.poll() is None for producer in producers):
            self.something()
            pause.wait(every_seconds)
            self._check_back.run_once()
        assert [producer.returncode for producer in producers] == [0] * len(producers)

    def settle(self, within_seconds: float) -> int:
        """Let everything arrive; returns how many transactions committed."""
        while len(self.consumers) < 2:
            self.join()
        committed = int(self.bench.rows("SELECT count(*) FROM business")[0][0])

        def arrived() -> bool:
            self._check_back.run_once()
            return self.bench.effect_count() >= committed and self.undecided() == 0

        eventually(arrived, within_seconds=within_seconds, what=f"{committed} effects")
        self._broker.close()
        return committed

    def undecided(self) -> int:
        statement = """
            SELECT count(*) FROM outbox.commit_log log WHERE half
            AND NOT EXISTS (SELECT FROM outbox.op_log op WHERE op.transaction_id = log.transaction_id)
        """
        return int(self.bench.rows(statement)[0][0])


def storm(bench: ConsumptionBench, mode: str, *, producers: int, count: int, keys: int, every_seconds: float) -> None:
    bench.declare("orders", queues=6, types=FIFO)
    bench.connection.execute(
        "CREATE TABLE business (key text, n integer, message_id uuid UNIQUE, PRIMARY KEY (key, n))"
    )
    raging = Storm(bench, mode, seed=count)
    with bench.sequencing():
        raging.join()
        raging.rage(raging.produce(producers, count, keys), every_seconds)
        committed = raging.settle(within_seconds=60 + count / 100)
        for consumer in raging.consumers:
            raging.leave(consumer)
    assert_each_once_in_order(bench.effects(), committed)
    assert bench.rows("SELECT count(*) FROM effect JOIN business USING (key, n, message_id)") == [(committed,)]
    assert 0 < committed < producers * count
    assert raging.happened["killed"] > 0
    assert bench.rows("SELECT count(*) > 0 FROM outbox.op_log WHERE decided_by = 'K'") == [(True,)]
    bench.assert_conserved("g")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("orderly", marks=pytest.mark.soak), "key_ordered"])
def test_storm_keeps_every_key_in_commit_order(bench: ConsumptionBench, mode: str) -> None:
    storm(bench, mode, producers=2, count=800, keys=50, every_seconds=0.7)


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["orderly", "key_ordered"])
def test_storm_of_a_hundred_thousand_over_a_thousand_keys(bench: ConsumptionBench, mode: str) -> None:
    storm(bench, mode, producers=4, count=25_000, keys=1_000, every_seconds=2.0)
