"""docs/architecture.md names modules and what is in them: all of it is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
# The tests that the page names are looked for in test_states.py.
NAMED = re.compile(r"`((?:outbox|spark|sample_project)/[^`\s]*\.py)(?:::([A-Za-z_.]+))?`")


def named() -> list[tuple[str, str]]:
    """(path, name within it or ''), each once."""
    return sorted(set(NAMED.findall(PAGE.read_text(encoding="utf-8"))))


def defines(module: ast.AST, name: str) -> bool:
    """Whether a module (or class) defines `name`, or `Class.method`."""
    first, _, rest = name.partition(".")
    for node in ast.iter_child_nodes(module):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == first:
            return not rest or defines(node, rest)
    return False


@pytest.mark.parametrize(("path", "name"), named())
def test_what_the_page_names_is_there(path: str, name: str) -> None:
    assert (ROOT / path).is_file(), f"docs/architecture.md names {path}, which is not there"
    if name:
        assert defines(ast.parse((ROOT / path).read_text(encoding="utf-8")), name), f"{path} has no {name}"


def test_every_path_on_the_page_is_checked() -> None:
    paths = set(re.findall(r"`(\w+/[\w/]+\.py)\b", PAGE.read_text(encoding="utf-8")))
    paths = {path for path in paths if not path.startswith("tests/")}
    assert paths - {path for path, _ in named()} == set()
    assert {path.split("/")[0] for path in paths} == {"outbox", "spark"}


def test_the_index_answers_its_questions_with_code() -> None:
    rows = re.findall(r"^\| ([^|]+\?) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 10
    assert [question for question, answer in rows if "::" not in answer] == []


def test_the_check_itself_finds_what_is_missing() -> None:
    module = ast.parse("class Here:\n    def method(self): ...")
    assert defines(module, "Here.method")
    assert not defines(module, "Here.other")
    assert not defines(module, "method")
