"""SIGKILL of a producer at every step: committed means delivered once, rolled back means never seen."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest

from outbox.contrib.django import run_check_back
from outbox.contrib.django.database.aliases import broker_database
from outbox.contrib.django.settings.conf import get_settings
from outbox.utils import faults
from tests.django.driver import ROUNDS
from tests.django.processes import process
from tests.django.shop.models import Order
from tests.django.state import stored
from tests.django.support import sequence
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("empty_log")

KILLED = -signal.SIGKILL
# Only a message with a unique key passes this point; see test_unique_crash.py.
UNIQUE_STEP = "producer.after_options"
STEPS = [point for point in faults.POINTS if point.startswith("producer.") and point != UNIQUE_STEP]


@pytest.fixture
def driver() -> Iterator[subprocess.Popen[str]]:
    """A driver process on the databases of this test."""
    with process(["-m", "tests.django.driver"], outbox={"BROKER": get_settings().broker}) as started:
        yield started


def run(driver: subprocess.Popen[str], prefix: str, mode: str, specification: str) -> int:
    """One process of the driver; its exit code."""
    assert driver.stdin is not None
    assert driver.stdout is not None
    driver.stdin.write(f"{prefix} {mode} {specification}\n")
    driver.stdin.flush()
    answer = driver.stdout.readline()
    assert answer, "the driver died"
    return int(answer)


def settle() -> None:
    """Check back until nothing is undecided, then queue what is committed."""

    def settled() -> bool:
        run_check_back()
        return all(item.decision is not None for item in stored())

    eventually(settled, within_seconds=30, what="every message decided")
    sequence()


def delivered() -> Counter[str]:
    """Key of every message that consumers see, and how often."""
    with closing(broker_database().connect()) as connection:
        rows = connection.execute(
            "SELECT l.key FROM outbox.consume_queue JOIN outbox.commit_log l USING (log_id)"
        ).fetchall()
    return Counter(key for (key,) in rows)


def committed() -> Counter[str]:
    """Number of every order whose transaction committed."""
    return Counter(Order.objects.values_list("number", flat=True))


def differences() -> Counter[str]:
    """Orders that were committed and not delivered once, or delivered and not committed."""
    business, messages = committed(), delivered()
    return (business - messages) + (messages - business)


@pytest.mark.parametrize("path", ["two_phase"], indirect=True)
def test_undisturbed_the_work_is_what_it_should_be(path: str, driver: subprocess.Popen[str]) -> None:
    assert run(driver, "calm", "plain", "-") == 0
    assert run(driver, "still", "decorated", "-") == 0
    # Processes forked after the parent published have flushers of their own.
    assert {item.decided_by for item in stored() if item.key[-2] in "cd"} == {"P"}
    settle()
    assert differences() == Counter()
    expected = {f"{prefix}-{kind}{n}" for prefix in ("calm", "still") for kind in "cd" for n in range(ROUNDS)}
    assert {key for key in committed() if not key.startswith("parent")} == expected


def kill_everywhere(driver: subprocess.Popen[str], path: str, times: int) -> None:
    steps = STEPS if path == "two_phase" else ["producer.before_local_commit", "producer.after_local_commit"]
    killed = Counter[str]()
    for step in steps:
        for mode in ("plain", "decorated"):
            for visit in range(1, times + 1):
                prefix = f"{step.partition('.')[2]}-{mode}-{visit}"
                killed[step] += run(driver, prefix, mode, f"{step}=kill@{visit}") == KILLED
    settle()
    assert differences() == Counter()
    assert set(killed) == set(steps), "every step was reached"


def test_killed_at_every_step(path: str, driver: subprocess.Popen[str]) -> None:
    kill_everywhere(driver, path, times=3)


@pytest.mark.slow
def test_killed_at_any_moment(path: str, driver: subprocess.Popen[str]) -> None:
    ends = [run(driver, f"any-{number}", ("plain", "decorated")[number % 2], "random:0.15") for number in range(20)]
    settle()
    assert differences() == Counter()
    assert KILLED in ends


@pytest.mark.soak
def test_killed_at_every_step_many_times(path: str, driver: subprocess.Popen[str]) -> None:
    kill_everywhere(driver, path, times=20)


@pytest.mark.soak
def test_killed_at_any_moment_many_times(path: str, driver: subprocess.Popen[str]) -> None:
    for number in range(400):
        run(driver, f"any-{number}", ("plain", "decorated")[number % 2], "random:0.15")
    settle()
    assert differences() == Counter()


def test_the_same_harness_fails_with_a_naive_publisher(driver: subprocess.Popen[str]) -> None:
    for visit in range(1, 4):
        assert run(driver, f"naive-{visit}", "naive", f"producer.after_local_commit=kill@{visit}") == KILLED
    settle()
    assert set(differences()) == {"naive-1-c0", "naive-2-d0", "naive-3-c1"}
