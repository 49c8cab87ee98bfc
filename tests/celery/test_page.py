"""docs/maintainers/celery-compatibility.md names tests that exist."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.celery.project import ROOT

PAGE = ROOT / "docs" / "maintainers" / "celery-compatibility.md"
NAMED = re.compile(r"`(test_\w+\.py::[^`]+)`")


def _rows() -> list[str]:
    """The rows of the tables that have a column `test`."""
    tables = re.findall(r"^\|[^\n]*\| test \|\n\|[-|]+\|\n((?:\|[^\n]*\n)+)", PAGE.read_text("utf-8"), re.MULTILINE)
    return [row for table in tables for row in table.splitlines()]


@pytest.mark.slow
def test_every_row_names_tests_that_are_there() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "tests/celery"]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    there = {name.removeprefix("tests/celery/") for name in collected}
    there |= {name.partition("[")[0] for name in there}
    assert len(_rows()) > 20
    for row in _rows():
        assert NAMED.search(row.split("|")[-2]), f"no test shows this: {row}"
    assert [name for row in _rows() for name in NAMED.findall(row) if name not in there] == []
