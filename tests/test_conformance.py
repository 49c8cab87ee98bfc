"""docs/maintainers/conformance.md answers for every scenario, by tests that exist or by the word "later"."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = (TESTS.parent / "docs" / "maintainers" / "conformance.md").read_text(encoding="utf-8")
SCENARIOS = (TESTS / "conformance_scenarios.txt").read_text(encoding="utf-8")


def scenarios(text: str) -> dict[str, list[str]]:
    """Section -> its scenarios."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if section := re.fullmatch(r"\[(.+)\]", line):
            names = found[section[1]] = []
        elif line and not line.startswith("#"):
            names.append(line)
    return found


def rows(page: str) -> dict[str, dict[str, str]]:
    """Section -> its scenarios -> their text on the page."""
    found: dict[str, dict[str, str]] = {}
    for line in page.splitlines():
        if line.startswith("## "):
            table = found[line[3:]] = {}
        elif (row := re.fullmatch(r"\| (.+) \| (.+) \|", line)) and row[1] != "scenario":
            table[row[1]] = row[2]
    return found


def unanswered(page: str) -> list[str]:
    """Rows without an existing test, and without the word "later"."""
    return [
        f"{name}: {answer}"
        for table in rows(page).values()
        for name, answer in table.items()
        if answer != "later" and not (named(answer) and not missing(answer))
    ]


def named(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", text)


def missing(text: str) -> list[str]:
    return [f"{file}::{name}" for file, name in named(text) if name not in functions(TESTS / file)]


@functools.cache
def functions(path: Path) -> set[str]:
    if not path.exists():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_page_has_a_row_for_every_scenario() -> None:
    assert {section: list(table) for section, table in rows(PAGE).items()} == scenarios(SCENARIOS)
    assert sum(map(len, scenarios(SCENARIOS).values())) >= 100


def test_every_row_names_existing_tests_or_later() -> None:
    assert unanswered(PAGE) == []


@pytest.mark.parametrize(
    "answer", ["", "soon", "`core/test_faults.py`", "`core/test_faults.py::test_gone`", "`gone.py::test_gone`, later"]
)
def test_an_answer_that_is_none_is_noticed(answer: str) -> None:
    assert unanswered(f"## Section\n| a scenario | {answer or ' '} |\n") != []
