"""docs/django.md and docs/tutorial.md run unchanged in an empty folder; tables name tests that exist."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox.broker import embedded
from tests.test_conformance import missing, named
from tests.wheel import ROOT, Environments, run

PAGE = (ROOT / "docs" / "maintainers" / "django-compatibility.md").read_text(encoding="utf-8")
# A fenced block with the line of text before it.
BLOCKS = re.compile(r"([^\n]*)\n\n```(\w+)\n(.*?)```", re.DOTALL)
FILE = re.compile(r"(Append to )?`([\w/]+\.py)`[^`]*:$")


@pytest.fixture
def project() -> Iterator[Path]:
    # Short: the socket of its server is in it.
    with tempfile.TemporaryDirectory(prefix="page-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
        embedded.stop(Path(folder) / "var" / "postgres")


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize(("page", "result"), [("django.md", "SUCCESSFUL 3"), ("tutorial.md", "no issues")])
def test_a_page_unchanged(page: str, result: str, environments: Environments, project: Path) -> None:
    output = ""
    installed: list[str] = []
    for before, language, text in BLOCKS.findall((ROOT / "docs" / page).read_text(encoding="utf-8")):
        if language == "python":
            write(project, before, text)
        elif language == "sh":
            installed += re.findall(r"^pip install '(.+)'$", text, re.MULTILINE)
            commands = [line for line in text.splitlines() if not line.startswith("pip ")]
            output = typed(environments.with_installed(*installed), project, "\n".join(commands))
        else:
            assert output.endswith(text), output
    assert result in output


def write(project: Path, before: str, text: str) -> None:
    match = FILE.search(before)
    assert match is not None, f"no file is named for this block: {before!r}"
    path = project / match[2]
    path.write_text(f"{path.read_text()}\n{text}" if match[1] else text)


def typed(programs: Path, project: Path, lines: str) -> str:
    """The output of the lines."""
    finished = run("sh", "-ec", lines, cwd=project, PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")
    assert finished.returncode == 0, f"{lines}\n{finished.stdout}{finished.stderr}"
    return finished.stdout


def test_cells_name_tests_that_are_there() -> None:
    tables = re.findall(r"^(\|[^\n]*\|)\n\|[-|]+\|\n((?:\|[^\n]*\n)+)", PAGE, re.MULTILINE)
    assert [head for head, _ in tables if not head.endswith("| tests |")] == []
    rows = [row for _, body in tables for row in body.splitlines()]
    assert len(rows) > 30
    assert missing(PAGE) == []
    assert [row for row in rows if not named(row) and "untested" not in row] == []


def test_the_check_of_cells_finds_what_is_missing() -> None:
    assert missing("| a | b | `django/test_publish.py::test_that_nobody_wrote` |") == [
        "django/test_publish.py::test_that_nobody_wrote"
    ]
