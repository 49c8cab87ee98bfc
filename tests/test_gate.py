"""`.ci/run` leaves slow tests out, but no planted fault, kill point or scenario of docs/maintainers/conformance.md."""

from __future__ import annotations

import ast
import functools
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import gate
from tests.test_conformance import PAGE, named, rows

TESTS = Path(__file__).resolve().parent
# By their names they plant a fault, kill a process, or switch a part off.
FAULTY = re.compile(r"kill|control_|planted|(?<!de)fault|switched_off|crash")


@functools.cache
def marks(path: Path) -> dict[str, set[str]]:
    """Test -> the markers of its function and of its module. A parameter's marker is none: other parameters run."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    of_module = {
        mark
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        for mark in _marks(node.value)
    }
    return {
        node.name: of_module.union(
            *(_marks(one) for one in node.decorator_list if "mark.parametrize" not in ast.unparse(one))
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def _marks(node: ast.expr) -> set[str]:
    return set(re.findall(r"pytest\.mark\.(\w+)", ast.unparse(node)))


def is_slow(file: str, name: str) -> bool:
    # The tests of RocketMQ that start a server are marked by their folder's conftest.py.
    return "slow" in marks(TESTS / file)[name] or file.startswith("rocketmq/")


def left_out(file: str, name: str) -> bool:
    """Whether `.ci/run` never runs this test.

    Those of RocketMQ, Kafka, Spark and the models wait for a change (.ci/changed).
    """
    listed = {one.partition("[")[0] for one in gate()}
    return "soak" in marks(TESTS / file)[name] or (is_slow(file, name) and f"tests/{file}::{name}" not in listed)


def slow_tests() -> Iterator[tuple[str, str]]:
    for path in sorted(TESTS.rglob("test_*.py")):
        file = path.relative_to(TESTS).as_posix()
        yield from (
            (file, name) for name, of_test in marks(path).items() if is_slow(file, name) and "soak" not in of_test
        )


def proven_elsewhere() -> dict[str, list[str]]:
    """Tests that gate.txt leaves to `make slow` -> the tests that prove the same in `.ci/run`."""
    lines = (TESTS / "gate.txt").read_text(encoding="utf-8").splitlines()
    return {line.partition(" = ")[0]: line.partition(" = ")[2].split() for line in lines if " = " in line}


def exists(test: str) -> bool:
    file, _, name = test.removeprefix("tests/").partition("[")[0].partition("::")
    return (TESTS / file).is_file() and name in marks(TESTS / file)


def test_the_list_names_existing_tests() -> None:
    named = [*gate(), *proven_elsewhere(), *(one for tests in proven_elsewhere().values() for one in tests)]
    assert [one for one in named if not exists(one)] == []


def test_no_planted_fault_and_no_kill_point_is_left_out() -> None:
    faults = [f"{file}::{name}" for file, name in slow_tests() if FAULTY.search(name) and left_out(file, name)]
    assert sorted(faults) == sorted(proven_elsewhere())
    proofs = {one for tests in proven_elsewhere().values() for one in tests}
    assert [one for one in proofs if left_out(*one.split("::"))] == []


def test_every_scenario_keeps_a_test() -> None:
    """Those apart that only `make faults` has."""
    lost = [
        scenario
        for table in rows(PAGE).values()
        for scenario, answer in table.items()
        if answer != "later" and all(left_out(*one) for one in named(answer)) and not all(map(_is_soak, named(answer)))
    ]
    assert lost == []


def _is_soak(test: tuple[str, str]) -> bool:
    return "soak" in marks(TESTS / test[0])[test[1]]


# -- .ci/changed ------------------------------------------------------------------------------------

PORT = "outbox/ports.py"
VIEW = "CREATE VIEW message_v1 AS SELECT 1;\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with the script and some ground of each suite, committed."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(TESTS.parent / ".ci" / "changed", tmp_path / ".ci")
    write(tmp_path, PORT, "def send() -> None: ...\n")
    write(tmp_path, "outbox/contrib/forwarding/sinks/kafka.py", "A = 1\n")
    write(tmp_path, "outbox/broker/schema/current.sql", f"CREATE TABLE topic ();\n{VIEW}")
    write(tmp_path, "pyproject.toml", '[project.optional-dependencies]\nkafka = ["a"]\nspark = ["b"]\n')
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=folder, check=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "one")


def changed(folder: Path, *arguments: str) -> str:
    script = [str(folder / ".ci" / "changed"), *arguments]
    done = subprocess.run(script, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("file", "text", "suites"),
    [
        (PORT, '"""Ports."""\n\ndef send() -> None:\n    """Send."""  # soon\n    ...\n', ""),
        (PORT, "def send(now: float) -> None: ...\n", "rocketmq"),
        ("outbox/rocketmq/new.py", "A = 1\n", "rocketmq"),
        ("outbox/contrib/forwarding/sinks/kafka.py", "A = 2\n", "kafka"),
        ("outbox/broker/schema/current.sql", f"CREATE TABLE topic (n int);\n-- A view.\n{VIEW}", ""),
        ("outbox/broker/schema/current.sql", VIEW.replace("1", "2"), "spark"),
        ("outbox/broker/groups/leases.py", "A = 1\n", ""),
        ("tests/proof/lease.pml", "bool done;\n", "proof"),
        ("pyproject.toml", '[project.optional-dependencies]\nkafka = ["a"]\nspark = ["c"]\n', "spark"),
    ],
)
def test_a_suite_runs_if_what_it_rests_on_has_changed(checkout: Path, file: str, text: str, suites: str) -> None:
    write(checkout, file, text)
    git(checkout, "add", "--all")
    assert changed(checkout, "HEAD") == suites


def test_a_change_is_one_since_the_newest_commit_that_has_passed(checkout: Path) -> None:
    every = "rocketmq or kafka or spark or proof"
    assert changed(checkout) == every, "a young repository"
    git(checkout, "update-ref", "refs/remotes/origin/HEAD", "HEAD")
    write(checkout, PORT, "A = 1\n")
    commit(checkout)
    assert changed(checkout) == "rocketmq", "since the branch left origin's"
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True).stdout
    write(checkout, "var/passed", head)
    assert changed(checkout) == "", "since the last run of this checkout"
    git(checkout, "commit", "--quiet", "--amend", "--message", "two")
    assert changed(checkout) == "rocketmq", "which is not of this branch any more"


def test_what_suites_rest_on_exists() -> None:
    ground = runpy.run_path(str(TESTS.parent / ".ci" / "changed"))["GROUND"]
    paths = [path for of_suite in ground.values() for path in of_suite]
    assert [path for path in paths if not (TESTS.parent / path).exists()] == []
