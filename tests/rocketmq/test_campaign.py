"""Everything is killed again and again: effects are the committed rows exactly."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from outbox.contrib.django.engine import broker as broker_access
from outbox.rocketmq import admin, stranded
from outbox.utils import faults
from tests.django.shop.models import Order
from tests.rocketmq.conftest import running_server
from tests.rocketmq.project import Project, expected, happened, make_project, nothing_lost_invented_or_doubled
from tests.rocketmq_server import PrivateRocketMQ

CHILD = ["-m", "outbox.contrib.django.worker.child"]
CHILDREN = {"check": [*CHILD, "check"], "consumer-1": [*CHILD, "consumer"], "consumer-2": [*CHILD, "consumer"]}
# No message of these tests is unique.
STEPS = [point for point in faults.POINTS if point.startswith("producer.") and point != "producer.after_options"]


class Campaign:
    """One project, its worker's processes, and what was killed."""

    def __init__(self, project: Project, server: PrivateRocketMQ, chance: random.Random) -> None:
        self.killed = Counter[str]()
        self._server = server
        self._project = project
        self._chance = chance
        self._stack = ExitStack()
        self._children: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Campaign:
        self.tend()
        return self

    def __exit__(self, *given: object) -> None:
        self._stack.close()

    def tend(self) -> None:
        """Start what is not running, as the worker's supervisor does."""
        for name, arguments in CHILDREN.items():
            child = self._children.get(name)
            if child is None or child.poll() is not None:
                self._children[name] = self._stack.enter_context(self._project.running(arguments))

    def round(self, number: int) -> None:
        """Four producers side by side, two of which die; meanwhile something else is killed."""
        step = self._chance.choice(STEPS)
        arguments = ["-m", "tests.rocketmq.driver"]
        with ExitStack() as stack:

            def produce(name: str, how: str, faults: str = "") -> subprocess.Popen[str]:
                given = [*arguments, f"{name}-{number}", how, "3"]
                return stack.enter_context(self._project.running(given, faults=faults))

            producers = {
                "whole": produce("whole", "plain"),
                "exits": produce("exits", "exits"),
                "fell": produce("fell", "decorated", f"{step}=kill@{self._chance.randint(1, 6)}"),
                "shot": produce("shot", "plain"),
            }
            time.sleep(self._chance.uniform(1, 8))
            producers["shot"].kill()
            self._kill_one()
            deadline = time.monotonic() + 150
            while any(one.poll() is None for one in producers.values()):
                assert time.monotonic() < deadline, "a producer does not end"
                time.sleep(0.2)
            self.killed["producers"] += sum(one.returncode == -signal.SIGKILL for one in producers.values())
        self.tend()

    def _kill_one(self) -> None:
        victim = self._chance.choice(["server", *CHILDREN, "all"])
        if victim in ("server", "all"):
            self._server.kill()
            self.killed["servers"] += 1
        for name, child in self._children.items():
            if victim in (name, "all") and child.poll() is None:
                child.kill()
                self.killed["worker processes"] += 1
        if victim in ("server", "all"):
            # All of the worker starts while there is no proxy, or when it has come back.
            early = self._chance.random() < 0.5
            if early:
                self.tend()
            time.sleep(self._chance.uniform(0, 4))
            self._server.start()
        if self._chance.random() < 0.5:
            # Longer than the checks last: RocketMQ gives up.
            time.sleep(self._chance.uniform(0, 6))
        self.tend()


@pytest.fixture
def server(programs: Path) -> Iterator[PrivateRocketMQ]:
    """A server that gives up after four checks, one a second."""
    with running_server(programs, transactionCheckMax=4) as server:
        yield server


@pytest.fixture
def project(server: PrivateRocketMQ, application: None, outbox_settings: Callable[..., None]) -> Iterator[Project]:
    """A project; this process is no producer, so that it answers no checks."""
    project = make_project(server)
    outbox_settings(**project.outbox)
    yield project
    broker_access.reset_broker()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("seed", "rounds"),
    [(1, 3), pytest.param(2, 20, marks=pytest.mark.soak), pytest.param(3, 20, marks=pytest.mark.soak)],
)
def test_effects_are_the_committed_rows_whichever_process_is_killed(
    project: Project, server: PrivateRocketMQ, seed: int, rounds: int
) -> None:
    with Campaign(project, server, random.Random(seed)) as campaign:
        for number in range(rounds):
            campaign.round(number)
        nothing_lost_invented_or_doubled(within_seconds=240)
        given_up = admin.end_of_queue(server.admin, stranded.TOPIC)
    print(
        f"seed {seed}: {Order.objects.count()} committed orders, {sum(happened().values())} of {len(expected())} "
        f"effects, killed {dict(campaign.killed)}, {given_up} half messages given up by check-back"
    )
