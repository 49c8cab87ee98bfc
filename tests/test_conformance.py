"""docs/conformance.md names tests that exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "conformance.md"


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`([a-z_/]+\.py)::(test_\w+)`", PAGE.read_text(encoding="utf-8"))
    missing = [f"{file}::{name}" for file, name in named if name not in functions(TESTS / file)]
    assert len(named) > 50
    assert missing == []


@functools.cache
def functions(path: Path) -> set[str]:
    if not path.exists():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
