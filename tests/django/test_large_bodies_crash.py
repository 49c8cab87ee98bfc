"""SIGKILL of a publisher, of the pass and of an erasure at every step: no message is without its object."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest
from django.db import transaction

from outbox import hooks
from outbox.contrib.django import message, publish
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.large_bodies.orphans import remove_orphans
from tests.django.driver import LARGE
from tests.django.large_storage import DECLARED, LATER, large_bodies, objects, referred, remove_a_year_later
from tests.django.processes import process
from tests.django.test_crash import KILLED, committed, delivered, differences, run, settle

pytestmark = pytest.mark.usefixtures("empty_log")

UPLOADS: Final = ["large_body.before_upload", "large_body.after_upload"]
TWO_PHASE: Final = [*UPLOADS, "producer.after_ledger", "producer.after_half", "producer.after_local_commit"]
ATOMIC: Final = [*UPLOADS, "producer.after_local_commit"]
PASS: Final = "large_body.before_delete"


@pytest.fixture
def folder(path: str, tmp_path: Path, outbox_settings: Callable[..., None]) -> Iterator[Path]:
    with large_bodies(tmp_path / "large", outbox_settings) as found:
        yield found


@pytest.fixture
def driver(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver process on the databases and the storage of this test."""
    outbox = {"BROKER": get_settings().broker, "LARGE_BODIES": DECLARED}
    variables = {"TEST_LARGE_BODIES": str(folder)}
    with process(["-m", "tests.django.driver"], outbox=outbox, variables=variables) as one:
        yield one


def killed(arguments: list[str], folder: Path, specification: str) -> int:
    """Run a process that is killed at a fault point; its exit code."""
    outbox = {"BROKER": get_settings().broker, "LARGE_BODIES": DECLARED}
    variables = {"TEST_LARGE_BODIES": str(folder)}
    with process(arguments, outbox=outbox, faults=specification, quiet=True, variables=variables) as one:
        return one.wait(timeout=60)


def test_a_publisher_killed_at_every_step(path: str, folder: Path, driver: subprocess.Popen[str]) -> None:
    for step in TWO_PHASE if path == "two_phase" else ATOMIC:
        for visit in (1, 2):
            prefix = f"{step.partition('.')[2]}-{visit}"
            assert run(driver, prefix, "large", f"{step}=kill@{visit}") == KILLED
    assert run(driver, "torn", "torn", "-") == KILLED
    settle()
    assert differences() == Counter() and len(committed()) > 5
    left = set(objects(folder)) - referred()
    assert left, "killed publishers leave orphans"
    assert referred() <= set(objects(folder))
    assert remove_a_year_later() == len(left)
    assert set(objects(folder)) == referred()
    whole = {content for one, content in objects(folder).items()}
    assert all(content.endswith(LARGE.encode() + b'"}') for content in whole)
    assert set(delivered()) == set(committed())


@pytest.mark.parametrize("path", ["atomic", pytest.param("two_phase", marks=pytest.mark.slow)], indirect=True)
def test_the_pass_and_an_erasure_killed_while_they_remove(path: str, folder: Path) -> None:
    with transaction.atomic():
        kept = publish("orders", {"more": LARGE}, key="kept").message_id
        publish("orders", {"more": LARGE}, key="erased")
    orphans = {message("orders", {"more": LARGE}).message_id for _ in range(4)}
    remove_orphans()
    later = (datetime.now(UTC) + LATER).isoformat()
    code = (
        "import django; django.setup(); from datetime import datetime; from outbox.contrib.large_bodies."
        f"orphans import remove_orphans; remove_orphans(now=datetime.fromisoformat({later!r}))"
    )
    assert killed(["-c", code], folder, f"{PASS}=kill@3") == -signal.SIGKILL
    assert len(orphans & set(objects(folder))) == 2
    arguments = ["-m", "django", "outbox_erase", "orders", "--key", "erased", "--reason", "a test", "--no-input"]
    assert killed(arguments, folder, f"{PASS}=kill") == -signal.SIGKILL
    # The row is erased before the object is deleted, so no message is without its object.
    assert referred() == {kept} < set(objects(folder))
    assert remove_orphans().removed == 1, "the erased one, although it is young"
    assert remove_orphans(now=datetime.fromisoformat(later)).removed == 2
    assert set(objects(folder)) == {kept}


def test_every_step_is_killed() -> None:
    points = [point for point in hooks.fault_points if point.startswith("large_body.")]
    assert sorted([*UPLOADS, PASS]) == sorted(points)
