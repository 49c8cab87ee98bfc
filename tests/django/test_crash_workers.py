"""SIGKILL of the broker, of check-back and of a consumer at every step: effects stay what the business rows say."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections import Counter
from contextlib import AbstractContextManager
from typing import Final

import pytest
from django.db import transaction

from outbox.broker.operations.audit import count_messages
from outbox.contrib.django import publish
from outbox.contrib.django.database.aliases import on_broker
from outbox.utils import faults
from tests.django.processes import forking, process
from tests.django.sessions import broker_connection
from tests.django.shop.models import Effect, Order
from tests.django.state import rolled_back, stored
from tests.django.support import end_messages_lost
from tests.django.test_crash import STEPS as PRODUCER_STEPS
from tests.django.test_crash import UNIQUE_STEP
from tests.support import eventually

pytestmark = [pytest.mark.usefixtures("databases"), pytest.mark.timeout(120)]

KEYS: Final = 3


# The process in which the points of a name lie.
WORKERS: Final = {
    "sequencer": ["-m", "outbox.contrib.django.worker.child", "broker"],
    "check": ["-m", "django", "outbox_worker", "--role", "check"],
    "consumer": ["-m", "outbox.contrib.django.worker.child", "consumer"],
}
# The same processes, for tests.django.forked_children.
ROLES: Final = {"sequencer": "broker", "check": "check", "consumer": "consumer"}
# No ordinary run passes it: broker/test_resync.py kills there.
RESYNC: Final = "sequencer.mid_resync"
# test_claims_processes.py kills there.
CLAIM_STEPS: Final = [point for point in faults.POINTS if point.startswith("claim.")]
WORKER_STEPS: Final = [point for point in faults.POINTS if point.split(".")[0] in WORKERS and point != RESYNC]


def worker(name: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A worker."""
    return process(WORKERS[name], quiet=True)


def test_every_fault_point_is_armed() -> None:
    elsewhere = [*CLAIM_STEPS, UNIQUE_STEP, RESYNC]
    assert sorted([*PRODUCER_STEPS, *WORKER_STEPS, *elsewhere]) == sorted(faults.POINTS)


def place(number: int) -> None:
    """An order with a message of each kind; the FIFO one says by its tag which one of its key it is."""
    Order.objects.create(number=f"n{number}")
    publish("orders", {}, key=f"n{number}")
    publish("payments", {}, key=f"n{number}")
    publish("steps", {}, key=f"k{number % KEYS}", tag=str(number))


def work(numbers: range) -> None:
    """Of four orders one commits, one rolls back, and two do so and lose their end message."""
    for number in numbers:
        with end_messages_lost() if number % 4 > 1 else contextlib.nullcontext():
            with rolled_back() if number % 2 else transaction.atomic():
                place(number)


def committed() -> list[int]:
    return sorted(int(number[1:]) for number in Order.objects.values_list("number", flat=True))


def expected() -> Counter[str]:
    """An effect of each message; that of `orders` publishes a step of its own."""
    return Counter(
        effect
        for number in committed()
        for effect in (f"n{number}", f"step-n{number}", f"payment-n{number}", f"step-k{number % KEYS}")
    )


def effects() -> Counter[str]:
    return Counter(Effect.objects.values_list("number", flat=True))


def settled() -> bool:
    return (effects() - expected()) != Counter() or effects() == expected()


def steps_by_key() -> dict[str, list[int]]:
    """The messages with a tag, by key, as consumers see them."""
    with broker_connection() as (connection, schema):
        connection.execute("SELECT set_config('search_path', %s, false)", [schema])
        rows = connection.execute(
            "SELECT l.key, l.tag::integer FROM consume_queue q JOIN commit_log l USING (log_id)"
            " WHERE l.tag <> '' ORDER BY q.queue_id, q.queue_offset"
        ).fetchall()
    found: dict[str, list[int]] = {}
    for key, number in rows:
        found.setdefault(key, []).append(number)
    return found


def differences() -> list[str]:
    """The equations of conservation that do not hold, and what is still on its way."""
    counted = on_broker(count_messages)
    on_its_way = [f"{group.name}: lag {group.lag}" for group in counted.groups.values() if group.lag]
    return [*counted.differences(), *on_its_way]


def assert_nothing_is_wrong() -> None:
    """Effects are exactly the business rows, all messages are decided and accounted for, every key is in order."""
    assert effects() == expected()
    assert [item.key for item in stored() if item.half and item.decision is None] == []
    assert differences() == []
    by_key = {f"k{key}": [number for number in committed() if number % KEYS == key] for key in range(KEYS)}
    assert steps_by_key() == by_key


class Scene:
    """All workers but one run undisturbed; that one is killed at a point, again and again."""

    def __init__(self, name: str, stack: contextlib.ExitStack) -> None:
        self._name = name
        self._next = 0
        self._victims = stack.enter_context(forking(ROLES[name]))
        for other in WORKERS:
            if other != name:
                stack.enter_context(worker(other))

    def kill(self, point: str, visit: int = 1) -> None:
        """Half of the work waits for the process that is killed, half arrives while it runs."""
        self._work()
        self._victims.start(f"{point}=kill@{visit}")
        self._work()
        assert self._victims.wait() == -signal.SIGKILL, point

    def settle(self) -> None:
        """Another process takes over; then everything must be as if there had been no kill."""
        with worker(self._name):
            eventually(settled, within_seconds=60, what=lambda: f"missing effects: {expected() - effects()}")
            # The effects are there an instant before the offsets, which the equations count.
            eventually(lambda: not differences(), what=lambda: str(differences()))
        assert_nothing_is_wrong()

    def _work(self) -> None:
        work(range(self._next, self._next + 8))
        self._next += 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sequencer", "consumer", "check"])
def test_a_worker_killed_at_every_step(name: str) -> None:
    with contextlib.ExitStack() as stack:
        scene = Scene(name, stack)
        for point in WORKER_STEPS:
            if point.startswith(f"{name}."):
                scene.kill(point)
        scene.settle()


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("point", WORKER_STEPS)
def test_a_worker_killed_many_times_at_a_step(point: str) -> None:
    name = point.split(".")[0]
    with contextlib.ExitStack() as stack:
        scene = Scene(name, stack)
        for number in range(20):
            # A process that takes all messages at once may not reach the point a second time.
            takes_all = name == "check" or point.endswith(("_offset", "_send_back"))
            scene.kill(point, visit=1 if takes_all else number % 3 + 1)
            scene.settle()
