"""Bounce: records flow, the broker and every other process is killed at random, every third transaction is aborted."""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from django.db import transaction

from outbox.contrib.django.engine.broker import flush, reset_broker
from outbox.contrib.django.operations.installation import install_broker
from outbox.contrib.django.settings.conf import get_settings
from tests.django.bouncing import is_aborted
from tests.django.processes import process
from tests.django.shop.models import Order
from tests.django.test_crash_workers import (
    WORKERS,
    assert_nothing_is_wrong,
    committed,
    differences,
    effects,
    expected,
    settled,
)
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases")

PRODUCER: Final = "producer"
PATHS: Final[dict[str, dict[str, Any]]] = {"two_phase": {}, "atomic": {"BROKER": "default"}}


class Bouncer:
    """Runs one process of each kind, the producer too, and kills one of them again and again until told to stop."""

    def __init__(self, outbox: dict[str, Any], producer: list[str], chance: random.Random) -> None:
        self._outbox = outbox
        self._chance = chance
        self._programs = {**WORKERS, PRODUCER: producer}
        self._running: dict[str, contextlib.ExitStack] = {}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self.kills = Counter[str]()
        for name in self._programs:
            self._start(name)

    def _start(self, name: str) -> None:
        self._running[name] = stack = contextlib.ExitStack()
        self._processes[name] = stack.enter_context(process(self._programs[name], outbox=self._outbox, quiet=True))

    def bounce(self, count: int, *, producer_kills: int) -> None:
        """Kill at random until the producer has ended by itself, and each other kind was killed.

        The producer is killed each time that it got some way: a machine that is slow to start processes would never
        let it finish otherwise.
        """
        steps = sorted(self._chance.sample(range(count // 10, count * 9 // 10), producer_kills))
        while self._has_work() or not all(self.kills[name] for name in WORKERS):
            time.sleep(self._chance.uniform(0.1, 0.8))
            if steps and self._has_work() and Order.objects.count() >= steps[0] * 2 // 3:
                steps.pop(0)
                self._kill(PRODUCER)
            else:
                self._kill(self._chance.choice(sorted(WORKERS)))

    def _kill(self, name: str) -> None:
        self._processes[name].kill()
        self._running[name].close()
        self.kills[name] += 1
        self._start(name)

    def _has_work(self) -> bool:
        code = self._processes[PRODUCER].poll()
        assert code in (None, 0), "the producer failed"
        return code is None

    def close(self) -> None:
        for stack in self._running.values():
            stack.close()


@pytest.fixture(params=["atomic", pytest.param("two_phase", marks=pytest.mark.slow)])
def outbox(request: pytest.FixtureRequest, outbox_settings: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """The settings of all processes, for either path; the broker never had a consumer."""
    chosen = PATHS[request.param]
    if chosen:
        chosen = {**chosen, "SCHEMA": "bounced"}
        outbox_settings(**chosen)
        install_broker(get_settings())
    yield chosen
    if chosen:
        flush(within_seconds=10)
        reset_broker()
        with transaction.atomic():
            transaction.get_connection().cursor().execute("DROP SCHEMA bounced CASCADE")


def run(outbox: dict[str, Any], count: int, seed: int) -> None:
    producer = ["-m", "tests.django.bouncing", str(count), str(seed)]
    bouncer = Bouncer(outbox, producer, random.Random(seed))
    try:
        bouncer.bounce(count, producer_kills=max(2, count // 500))
        eventually(settled, within_seconds=600, what=lambda: f"missing effects: {len(expected() - effects())}")
        eventually(lambda: not differences(), within_seconds=60, what=lambda: str(differences()))
    finally:
        bouncer.close()
    assert committed() == [number for number in range(count) if not is_aborted(number)]
    assert_nothing_is_wrong()
    assert bouncer.kills[PRODUCER] > 0
    print(f"seed {seed}: {count} records, {len(committed())} committed, kills: {dict(bouncer.kills)}")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_bounce(outbox: dict[str, Any]) -> None:
    run(outbox, 300, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_bounce_of_ten_thousand(outbox: dict[str, Any], seed: int) -> None:
    run(outbox, 10_000, seed)
