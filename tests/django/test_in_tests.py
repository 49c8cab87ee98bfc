"""An application's own tests never reach the broker of its settings, with any test runner."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.django.conftest import BROKER_TEMPLATE, point_alias
from tests.django.processes import ROOT, environment
from tests.django.state import stored

CASES = "tests.django.runner_cases"


@pytest.fixture(autouse=True)
def development(databases: None, new_database: Callable[..., str]) -> Iterator[None]:
    """A broker as a developer has it; every test database is named after it."""
    point_alias("broker", new_database(template=BROKER_TEMPLATE))
    yield
    assert stored() == []


def run(*arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


@pytest.mark.slow
def test_without_a_test_database_for_the_broker() -> None:
    names = ("Plain", "InMemory", "Live", "Simple", "Unguarded")
    assert "Ran 7 tests" in run("django", "test", "--noinput", *(f"{CASES}.{name}" for name in names))


@pytest.mark.slow
def test_with_a_test_database_that_some_tests_ask_for() -> None:
    names = ("Plain", "InMemory", "Live", "Simple", "WithItsOwnBroker")
    assert "Ran 7 tests" in run("django", "test", "--noinput", *(f"{CASES}.{name}" for name in names))


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["not for_the_broker", "test"])
def test_under_pytest(chosen: str, tmp_path: Path) -> None:
    path = ROOT / "tests" / "django" / "pytest_cases.py"
    isolated = ("-p", "no:cacheprovider", "--noconftest", "-c", str(tmp_path / "none.ini"), f"--rootdir={tmp_path}")
    (tmp_path / "none.ini").write_text("[pytest]\n")
    assert " passed" in run("pytest", *isolated, "-k", chosen, str(path))
