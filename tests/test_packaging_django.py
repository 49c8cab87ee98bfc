"""docs/django.md is true: it is typed as it stands, in an empty folder, and its cells name tests that are there."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from outbox.broker import embedded
from tests.test_conformance import missing, named
from tests.test_packaging import ROOT, environment, metadata, run, wheel

__all__ = ["environment", "wheel"]

PAGE = (ROOT / "docs" / "django.md").read_text(encoding="utf-8")
# A fenced block with the line of text before it.
BLOCKS = re.compile(r"([^\n]*)\n\n```(\w+)\n(.*?)```", re.DOTALL)
FILE = re.compile(r"(Append to )?`([\w/]+\.py)`[^`]*:$")


@pytest.fixture
def project() -> Iterator[Path]:
    # Short: the socket of its server is in it.
    with tempfile.TemporaryDirectory(prefix="page-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
        embedded.stop(Path(folder) / "var" / "postgres")


def test_the_page_as_it_stands(environment: Path, wheel: Path, project: Path) -> None:
    output = ""
    for before, language, text in BLOCKS.findall(PAGE):
        if language == "python":
            write(project, before, text)
        elif language == "sh":
            output = "".join(typed(environment, wheel, project, line) for line in text.splitlines())
        else:
            assert output.endswith(text), output
    assert "SUCCESSFUL 3" in output


def write(project: Path, before: str, text: str) -> None:
    match = FILE.search(before)
    assert match is not None, f"no file is named for this block: {before!r}"
    path = project / match[2]
    path.write_text(f"{path.read_text()}\n{text}" if match[1] else text)


def typed(environment: Path, wheel: Path, project: Path, line: str) -> str:
    """What a line prints."""
    program, *arguments = shlex.split(line)
    if program == "pip":
        # What it installs is there, from the wheel.
        installed = Requirement(arguments[-1])
        assert installed.name == metadata(wheel)["Name"]
        assert installed.extras <= set(metadata(wheel).get_all("Provides-Extra", []))
        return ""
    assert program == "python"
    finished = run(str(environment), *arguments, cwd=project)
    assert finished.returncode == 0, f"{line}\n{finished.stdout}{finished.stderr}"
    return finished.stdout


def test_cells_name_tests_that_are_there() -> None:
    rows = [
        line for line in PAGE.partition("## From")[0].splitlines() if line.startswith("| ") and "| tests |" not in line
    ]
    assert len(rows) > 10
    assert missing(PAGE) == []
    assert [row for row in rows if not named(row) and "untested" not in row] == []


def test_the_check_of_cells_finds_what_is_missing() -> None:
    assert missing("| a | b | `django/test_publish.py::test_that_nobody_wrote` |") == [
        "django/test_publish.py::test_that_nobody_wrote"
    ]
