"""`.ci/run` leaves out slow tests, but no planted fault, no kill point, and no scenario of docs/conformance.md."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import gate
from tests.test_conformance import PAGE, named, rows

TESTS = Path(__file__).resolve().parent
# `.ci/changed` says when these run.
OF_SERVERS = {"rocketmq", "kafka", "lake"}
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


def left_out(file: str, name: str) -> bool:
    """Whether `.ci/run` never runs this test."""
    of_test = marks(TESTS / file)[name]
    return "soak" in of_test or ("slow" in of_test and f"tests/{file}::{name}" not in gate())


def slow_tests() -> Iterator[tuple[str, str]]:
    for path in sorted(TESTS.rglob("test_*.py")):
        for name, of_test in marks(path).items():
            if "slow" in of_test and not of_test & {"soak", *OF_SERVERS}:
                yield path.relative_to(TESTS).as_posix(), name


def test_the_list_names_existing_tests() -> None:
    missing = [line for line in gate() if line.partition("::")[2] not in marks(TESTS.parent / line.partition("::")[0])]
    assert missing == []


def test_no_planted_fault_and_no_kill_point_is_left_out() -> None:
    assert [f"{file}::{name}" for file, name in slow_tests() if FAULTY.search(name) and left_out(file, name)] == []


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
