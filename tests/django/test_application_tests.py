"""The tests of an application, run as its developer runs them: `manage.py test`, pytest, pytest with xdist."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connections

from outbox.contrib.django import publish
from outbox.contrib.django.database.aliases import alias_conninfo
from tests.conftest import databases as databases_of
from tests.django.conftest import BROKER_TEMPLATE, point_alias
from tests.django.processes import ROOT, environment
from tests.django.state import stored
from tests.support import eventually

HERE = ROOT / "tests" / "django"


@pytest.fixture(autouse=True)
def development(databases: None, new_database: Callable[..., str], server_url: str) -> Iterator[None]:
    """A broker as a developer has it: no run touches it, and no run leaves a database of its own."""
    point_alias("broker", new_database(template=BROKER_TEMPLATE))
    before = databases_of(server_url)
    yield
    assert stored() == []
    assert databases_of(server_url) == before


def run(*arguments: str, outbox: dict[str, object] | None = None) -> str:
    finished = subprocess.run(
        [sys.executable, "-m", *arguments],
        env={
            **environment(outbox=outbox),
            "DJANGO_SETTINGS_MODULE": "tests.django.several_databases",
            "TEST_ARCHIVE_URL": alias_conninfo("other"),
        },
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def run_pytest(folder: Path, *arguments: str) -> str:
    (folder / "none.ini").write_text("[pytest]\n")
    isolated = ("-p", "no:cacheprovider", "--noconftest", "-c", str(folder / "none.ini"), f"--rootdir={folder}")
    return run("pytest", *isolated, *arguments, str(HERE / "outbox_pytest_cases.py"))


@pytest.mark.slow
def test_manage_py_test_in_parallel() -> None:
    assert "Ran 7 tests" in run("django", "test", "--noinput", "--parallel=2", "tests.django.outbox_cases")


@pytest.mark.slow
def test_with_a_listen_url_of_the_development_broker() -> None:
    name = "tests.django.outbox_cases.OnTheBroker"
    assert "Ran 3 tests" in run("django", "test", "--noinput", name, outbox={"LISTEN_URL": alias_conninfo("broker")})


@pytest.mark.slow
@pytest.mark.parametrize("last", ["Unguarded", "WithItsOwnBroker"])
def test_no_test_reaches_the_broker_of_the_settings(last: str) -> None:
    """Without a test database for the broker, and with one that some tests ask for."""
    names = ("Plain", "InMemory", "Live", last)
    cases = [f"tests.django.runner_cases.{name}" for name in names]
    assert "Ran 6 tests" in run("django", "test", "--noinput", *cases)


@pytest.mark.slow
def test_pytest(tmp_path: Path) -> None:
    assert "10 passed" in run_pytest(tmp_path)
    assert "2 passed" in run_pytest(tmp_path, "-k", "no_broker"), "no test asks for a test database of the broker"


@pytest.mark.slow
def test_a_repetition_of_a_test_begins_with_an_empty_outbox(tmp_path: Path) -> None:
    """As pytest-rerunfailures repeats a test."""
    (tmp_path / "none.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(
        "from _pytest.runner import runtestprotocol\n"
        "def pytest_runtest_protocol(item, nextitem):\n"
        "    runtestprotocol(item, nextitem=nextitem, log=False)\n"
    )
    case = tmp_path / "test_again.py"
    case.write_text(
        "from tests.django.outbox_cases import place\n"
        "def test_again(outbox):\n"
        "    place('1')\n"
        "    assert [one.key for one in outbox.messages('orders')] == ['1']\n"
    )
    isolated = ("-p", "no:cacheprovider", "-c", str(tmp_path / "none.ini"), f"--rootdir={tmp_path}")
    assert "1 passed" in run("pytest", *isolated, str(case))


@pytest.mark.soak
def test_pytest_with_xdist(tmp_path: Path) -> None:
    assert "10 passed" in run_pytest(tmp_path, "-n", "2")


def test_no_session_is_left_where_the_runner_drops_databases(databases: None) -> None:
    publish("orders", {}, key="keeps a connection", at_once=True)
    name = connections["broker"].settings_dict["NAME"]
    creation: Any = connections["broker"].creation
    with creation._nodb_cursor() as cursor:

        def sessions() -> list[Any]:
            cursor.execute("SELECT application_name FROM pg_stat_activity WHERE datname = %s", [name])
            found: list[Any] = cursor.fetchall()
            return found

        # The server ends a session a moment after its client has closed it; DROP DATABASE waits for that, too.
        eventually(lambda: not sessions(), within_seconds=5, what=lambda: str(sessions()))
    # Also none of the stored messages is lost by that.
    assert [item.key for item in stored()] == ["keeps a connection"]
    with psycopg.connect(alias_conninfo("broker"), autocommit=True) as connection:
        connection.execute("DELETE FROM outbox.commit_log")
        connection.execute("DELETE FROM outbox.op_log")
