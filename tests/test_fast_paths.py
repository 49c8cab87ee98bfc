"""With OUTBOX_FAST_PATHS=off everything holds that holds with the fast paths; each run is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# The rules of the protocol, and random programs full of ordinary mistakes.
QUICK = [
    "tests/contract/test_transactional.py",
    "tests/mistakes/test_programs.py::test_rows_messages_and_effects_agree[two_phase-producer]",
    "tests/mistakes/test_programs.py::test_rows_messages_and_effects_agree[atomic-consumer]",
]
FULL = [
    "tests/contract",
    "tests/mistakes",
    "tests/django/test_inbox.py",
    "tests/django/test_message_transactions.py",
    "tests/django/test_ordinary_mistakes.py",
    "tests/django/test_publish.py",
    "tests/broker/sequencer/test_order.py",
    "tests/broker/test_process.py",
]


def run_tests(server_url: str, paths: list[str]) -> None:
    """Run tests without the fast paths, on the server of this run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not soak and not slow", *paths],
        cwd=ROOT,
        env={**environment, "OUTBOX_FAST_PATHS": "off", "OUTBOX_POSTGRES_URL": server_url},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_protocol_and_ordinary_mistakes_without_the_fast_paths(server_url: str) -> None:
    run_tests(server_url, QUICK)


@pytest.mark.timeout(1800)
@pytest.mark.soak
def test_whole_suites_without_the_fast_paths(server_url: str) -> None:
    run_tests(server_url, FULL)


@pytest.mark.parametrize(("given", "printed"), [("off", "False"), (" OFF ", "False"), ("on", "True"), (None, "True")])
def test_the_switch_is_read_at_the_start(given: str | None, printed: str) -> None:
    done = start(given)
    assert done.stdout.strip() == printed
    assert ("the fast paths are off" in done.stderr) == (printed == "False")


def test_a_switch_that_is_neither_on_nor_off_is_refused() -> None:
    done = start("no")
    assert done.returncode != 0
    assert "OUTBOX_FAST_PATHS is 'no': set it to on or off" in done.stderr


def start(given: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "OUTBOX_FAST_PATHS"}
    if given is not None:
        environment["OUTBOX_FAST_PATHS"] = given
    program = "from outbox.broker.fastpath import switch; print(switch.enabled)"
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
