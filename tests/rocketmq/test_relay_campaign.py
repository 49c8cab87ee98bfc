"""Relays, consumers and the server are killed and frozen again and again: per key, the order is that of the commits."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from django.db import transaction

from outbox.contrib.django import publish
from outbox.contrib.django.engine import broker as broker_access
from outbox.contrib.rocketmq.apps import FAULT_POINTS
from outbox.contrib.rocketmq.relay_rows import rows_on
from tests.django.shop.models import Order
from tests.rocketmq.conftest import running_server
from tests.rocketmq.relay_project import RelayProject, in_threads, make_relay_project, watching
from tests.rocketmq_server import PrivateRocketMQ
from tests.support import eventually

STEPS = FAULT_POINTS
KEYS = 12


class Faults:
    """Two relays and a consumer of a worker: they are killed or frozen, and started again, until `stop` is set."""

    def __init__(self, project: RelayProject, chance: random.Random) -> None:
        self.counts = Counter[str]()
        self._project = project
        self._chance = chance
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the faults on a thread."""
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        with ExitStack() as stack:
            processes: dict[str, subprocess.Popen[str]] = {}
            while True:
                for name in ("relay-1", "relay-2", "consumer"):
                    if name not in processes or processes[name].poll() is not None:
                        processes[name] = stack.enter_context(self._started(name.partition("-")[0]))
                if self._stop.wait(self._chance.uniform(0.5, 4)):
                    return
                self._one(processes)

    def _started(self, role: str) -> AbstractContextManager[subprocess.Popen[str]]:
        step = ""
        if role == "relay" and self._chance.random() < 0.5:
            step = f"{self._chance.choice(STEPS)}=kill@{self._chance.randint(1, 40)}"
        return self._project.running(role, faults=step)

    def _one(self, processes: dict[str, subprocess.Popen[str]]) -> None:
        name = self._chance.choice(["relay-1", "relay-2", "consumer", "frozen", "frozen", "server"])
        if name == "server":
            self._project.server.kill()
            self._stop.wait(self._chance.uniform(0, 2))
            self._project.server.start()
        elif name == "frozen":
            frozen = processes[self._chance.choice(["relay-1", "relay-2"])]
            frozen.send_signal(signal.SIGSTOP)
            # Some freezes are longer than the lease.
            self._stop.wait(self._chance.uniform(0, 12))
            frozen.send_signal(signal.SIGCONT)
        else:
            processes[name].kill()
        self.counts[name] += 1


@pytest.fixture
def server(programs: Path) -> Iterator[PrivateRocketMQ]:
    with running_server(programs) as server:
        yield server


@pytest.fixture
def project(server: PrivateRocketMQ, application: None, outbox_settings: Callable[..., None]) -> Iterator[RelayProject]:
    project = make_relay_project(server)
    outbox_settings(**project.outbox)
    yield project
    broker_access.reset_broker()


def place(project: RelayProject, seed: int, transactions: int) -> None:
    """Transactions with one to three messages of random keys; a third of them, or of their savepoints, roll back."""
    chance = random.Random(seed)
    for number in range(transactions):
        name, key = f"{seed}-{number}", f"k{chance.randrange(KEYS)}"
        kind = chance.random()
        if kind < 0.2:
            project.commit(key, name, fail=True)
        elif kind < 0.4:
            with transaction.atomic():
                project.commit(key, f"{name}-inner", fail=True)
                project.commit(key, name)
        elif kind < 0.5:
            with transaction.atomic():
                publish(project.later.name, f"{name}-later", delay=chance.uniform(0, 5))
                Order.objects.create(number=f"{name}-later", status="later")
        else:
            project.commit(key, name)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("seed", "transactions"), [(1, 40), pytest.param(2, 1000, marks=pytest.mark.soak)], ids=["short", "long"]
)
def test_per_key_the_order_is_that_of_the_commits(project: RelayProject, seed: int, transactions: int) -> None:
    """Four producers side by side, of `transactions` each."""
    campaign = Faults(project, random.Random(seed))
    with campaign.running():
        in_threads([lambda one=one: place(project, one, transactions) for one in range(4)])
    with project.running("relay"), project.running("consumer"):
        eventually(lambda: not rows_on("default").exists(), within_seconds=300)
        committed = project.committed()
        later = set(committed.pop("later", []))
        expected = sum(map(len, committed.values())) + len(later)
        eventually(
            lambda: len(project.effects()) >= expected,
            within_seconds=300,
            what=lambda: f"{len(project.effects())} of {expected}",
        )
    # The consumer without an inbox begins at the oldest message, and sees every copy.
    with watching(project) as seen:
        eventually(lambda: seen.first() == committed, within_seconds=300, what=lambda: str(seen.first()))
    effects = project.effects()
    assert len(effects) == expected and set(effects) == {one for key in committed.values() for one in key} | later
    key_of = {number: key for key, numbers in committed.items() for number in numbers}
    handled: dict[str, list[str]] = {key: [] for key in committed}
    for number in effects:
        if number in key_of:
            handled[key_of[number]].append(number)
    assert handled == committed
    print(f"seed {seed}: {expected} committed, {seen.duplicates()} duplicates on RocketMQ, {dict(campaign.counts)}")
