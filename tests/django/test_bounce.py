"""Bounce: records flow, the broker and every other process is killed at random, every third transaction is aborted."""

from __future__ import annotations

import contextlib
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from django.db import transaction

from outbox.contrib.django import message_transaction
from outbox.contrib.django.broker import flusher, reset_broker
from outbox.contrib.django.conf import get_settings
from outbox.contrib.django.installation import install_broker
from tests.django.processes import process
from tests.django.shop.models import Order
from tests.django.state import rolled_back
from tests.django.test_crash_workers import (
    KEYS,
    WORKERS,
    assert_nothing_is_wrong,
    committed,
    differences,
    effects,
    expected,
    lost_ends,
    settled,
)
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases")

PATHS: Final[dict[str, dict[str, Any]]] = {"two_phase": {}, "atomic": {"BROKER": "default"}}


def place(number: int) -> None:
    """An order and its three messages, on three topics, as one transaction over them."""
    Order.objects.create(number=f"n{number}")
    with message_transaction() as tx:
        tx.publish("orders", {}, key=f"n{number}")
        tx.publish("payments", {}, key=f"n{number}")
        tx.publish("steps", {}, key=f"k{number % KEYS}", tag=str(number))


def produce(count: int, chance: random.Random) -> None:
    """A third of each key is aborted, one in five loses its end message."""
    for number in range(count):
        with lost_ends() if chance.random() < 0.2 else contextlib.nullcontext():
            with rolled_back() if number // KEYS % 3 == 2 else transaction.atomic():
                place(number)


class Bouncer:
    """Runs one process of each kind, and kills one of them again and again until told to stop."""

    def __init__(self, outbox: dict[str, Any], chance: random.Random) -> None:
        self._outbox = outbox
        self._chance = chance
        self._running: dict[str, contextlib.ExitStack] = {}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self.kills = 0

    def start(self, name: str) -> None:
        self._running[name] = stack = contextlib.ExitStack()
        self._processes[name] = stack.enter_context(process(WORKERS[name], outbox=self._outbox, quiet=True))

    def bounce_until(self, done: threading.Event) -> None:
        while not done.wait(self._chance.uniform(0.1, 0.8)):
            name = self._chance.choice(sorted(WORKERS))
            self._processes[name].kill()
            self._running[name].close()
            self.kills += 1
            self.start(name)

    def close(self) -> None:
        for stack in self._running.values():
            stack.close()


@pytest.fixture(params=sorted(PATHS))
def outbox(request: pytest.FixtureRequest, outbox_settings: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """The settings of all processes, for either path; the broker never had a consumer."""
    chosen = PATHS[request.param]
    if chosen:
        chosen = {**chosen, "SCHEMA": "bounced"}
        outbox_settings(**chosen)
        install_broker(get_settings())
    yield chosen
    if chosen:
        flusher.flush(within_seconds=10)
        reset_broker()
        with transaction.atomic():
            transaction.get_connection().cursor().execute("DROP SCHEMA bounced CASCADE")


def run(outbox: dict[str, Any], count: int, seed: int) -> None:
    chance = random.Random(seed)
    done = threading.Event()
    bouncer = Bouncer(outbox, chance)
    thread = threading.Thread(target=bouncer.bounce_until, args=[done])
    try:
        for name in WORKERS:
            bouncer.start(name)
        thread.start()
        produce(count, random.Random(seed + 1))
        eventually(lambda: bouncer.kills >= 5, within_seconds=60, what="five kills")
        done.set()
        thread.join()
        eventually(settled, within_seconds=300, what=lambda: f"missing effects: {expected() - effects()}")
        eventually(lambda: not differences(), within_seconds=60, what=lambda: str(differences()))
    finally:
        done.set()
        bouncer.close()
    assert len(committed()) == count - sum(number // KEYS % 3 == 2 for number in range(count))
    assert_nothing_is_wrong()


@pytest.mark.timeout(400)
def test_bounce(outbox: dict[str, Any]) -> None:
    run(outbox, 300, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_bounce_of_ten_thousand(outbox: dict[str, Any], seed: int) -> None:
    run(outbox, 10_000, seed)
