"""docs/maintainers/celery-compatibility.md names tests that exist."""

from __future__ import annotations

import re

from tests.celery.project import ROOT
from tests.test_conformance import functions

PAGE = (ROOT / "docs" / "maintainers" / "celery-compatibility.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)(?:\[[\w-]+\])?`")


def test_every_row_names_tests_that_are_there() -> None:
    tables = re.findall(r"^\|[^\n]*\| test \|\n\|[-|]+\|\n((?:\|[^\n]*\n)+)", PAGE, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 20
    assert [row for row in rows if not NAMED.search(row.split("|")[-2])] == []
    assert [name for name in NAMED.findall(PAGE) if name[1] not in functions(ROOT / "tests" / "celery" / name[0])] == []
