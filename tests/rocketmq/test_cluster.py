"""A cluster with the settings of docs/engines.md, whose processes are killed: effects are the committed rows.

The folder of a test has the logs of all processes.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from outbox.contrib.django.engine import broker as broker_access
from outbox.utils import faults
from tests.django.shop.models import Order
from tests.rocketmq.cluster import RocketMQCluster
from tests.rocketmq.conftest import PROGRAMS
from tests.rocketmq.project import Project, expected, happened, make_project, nothing_lost_invented_or_doubled
from tests.rocketmq_server import fetch_programs
from tests.support import eventually

CHILD: Final = ["-m", "outbox.contrib.django.worker.child"]
CHILDREN: Final = {"check": [*CHILD, "check"], "consumer-1": [*CHILD, "consumer"], "consumer-2": [*CHILD, "consumer"]}
# No message of these tests is unique.
STEPS: Final = [point for point in faults.POINTS if point.startswith("producer.") and point != "producer.after_options"]

# The version that docs/engines.md recommends.
VERSION: Final = "5.5.0"
# The transactions of one producer process.
BATCH: Final = 200
PRODUCERS: Final = ("producer-1", "producer-2")


@pytest.fixture
def cluster(programs: Path, tmp_path: Path) -> Iterator[RocketMQCluster]:
    """A cluster with RocketMQ's own times for checks."""
    jars = fetch_programs(PROGRAMS, VERSION)
    cluster = RocketMQCluster(tmp_path / "cluster", jars)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def project(cluster: RocketMQCluster, application: None, outbox_settings: Callable[..., None]) -> Iterator[Project]:
    """A project; this process is no producer, so that it answers no checks."""
    project = replace(make_project(cluster), more={"TEST_OUTBOX": json.dumps({"CHECK_INTERVAL_SECONDS": 3})})
    cluster.wait_for_topics(project.topics)
    outbox_settings(**project.outbox)
    yield project
    broker_access.reset_broker()


class Load:
    """Producers of random transactions and the processes of a worker, which are started again when they die."""

    def __init__(self, project: Project, folder: Path, seed: int) -> None:
        self.killed = Counter[str]()
        self._project = project
        self._folder = folder
        self._file = folder / "outcomes"
        self._file.touch()
        self._chance = random.Random(f"load-{seed}")
        self._stack = ExitStack()
        self._children: dict[str, subprocess.Popen[str]] = {}
        self._numbers = itertools.count()
        self._producing = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tend)

    def __enter__(self) -> Load:
        self._producing.set()
        self._thread.start()
        return self

    def __exit__(self, *given: object) -> None:
        self._stop.set()
        self._thread.join()
        self._stack.close()

    def outcomes(self) -> dict[str, str]:
        """The outcome of each finished transaction, as its caller saw it, by number."""
        lines = self._file.read_text(encoding="utf-8").split("\n")[:-1]
        return {number: outcome for outcome, number in (line.split(",") for line in lines)}

    def go_on(self) -> None:
        """Wait until more transactions have committed."""
        before = Order.objects.count()
        eventually(lambda: Order.objects.count() > before + 20, within_seconds=300, what="orders go on")

    def end(self) -> None:
        """Start no more producers, and wait for those that run."""
        self._producing.clear()
        eventually(
            lambda: all(child.poll() is not None for name, child in self._children.items() if name in PRODUCERS),
            within_seconds=600,
            what="producers end",
        )

    def _tend(self) -> None:
        while not self._stop.wait(0.2):
            for name, arguments in CHILDREN.items():
                if self._has_ended(name):
                    self._start(name, arguments)
            for name in PRODUCERS:
                if self._producing.is_set() and self._has_ended(name):
                    number = str(next(self._numbers))
                    dies = self._chance.random() < 0.3
                    faults = f"{self._chance.choice(STEPS)}=kill@{self._chance.randint(1, BATCH)}" if dies else ""
                    given = [f"r{number}", number, str(BATCH), str(self._file)]
                    self._start(name, ["-m", "tests.rocketmq.random_driver", *given], faults)

    def _has_ended(self, name: str) -> bool:
        child = self._children.get(name)
        if child is not None and child.poll() is None:
            return False
        if child is not None and child.returncode < 0:
            self.killed["producers" if name in PRODUCERS else "worker processes"] += 1
        return True

    def _start(self, name: str, arguments: list[str], faults: str = "") -> None:
        log = self._folder / f"{name}.log"
        self._children[name] = self._stack.enter_context(self._project.running(arguments, faults=faults, log=log))


def compare(load: Load, began: float) -> None:
    """End the load. Effects are the committed rows, and each caller was told what became of its transaction."""
    load.end()
    took = time.monotonic() - began
    nothing_lost_invented_or_doubled(within_seconds=1200)
    outcomes = load.outcomes()
    orders = set(Order.objects.values_list("number", flat=True))
    assert [number for number, said in outcomes.items() if (said == "committed") != (number in orders)] == []
    print(
        f"{len(outcomes)} transactions in {took:.0f} s: {dict(Counter(outcomes.values()))}; {len(orders)} committed "
        f"orders, {sum(happened().values())} of {len(expected())} effects; killed: {dict(load.killed)}"
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transactions", [1_000, 10_000])
def test_effects_are_exact_after_promotions(
    cluster: RocketMQCluster, project: Project, tmp_path: Path, transactions: int
) -> None:
    """The masters of both groups die in turns while transactions run, and come back as replicas."""
    began = time.monotonic()
    with Load(project, tmp_path, seed=1) as load:
        load.go_on()
        for group in itertools.cycle("ab"):
            victim = cluster.master(group)
            cluster.kill(victim)
            load.killed["masters"] += 1
            cluster.wait_for_masters()
            assert cluster.master(group) != victim
            load.go_on()
            cluster.start(victim)
            if load.killed["masters"] >= 2 and len(load.outcomes()) >= transactions:
                break
        compare(load, began)
