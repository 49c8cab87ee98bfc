"""The documents are short pages, their guarantees name tests, and their examples and commands are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from django.core.management import load_command_class

from tests.django import configured
from tests.documents import AROUND, FOR_DATA_TEAMS, FOR_OPERATORS
from tests.part_apps import app_of, command_files
from tests.test_conformance import missing, named
from tests.test_gate import is_slow, left_out

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.parent.name != "decisions")
GUARANTEES = (DOCS / "guarantees.md").read_text(encoding="utf-8")
# Ten minutes of reading. Tables and code are looked up.
WORDS = 2000
# The pages for users: all but those of maintainers and the decisions. A reader must find the page and finish it.
SITE = [path for path in PAGES if path.relative_to(DOCS).parts[0] != "maintainers"]
SITE_PAGES = 45
SITE_WORDS = 60_000


def words(text: str) -> int:
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return len(re.sub(r"^\|.*", "", prose, flags=re.MULTILINE).split())


def test_a_page_is_read_in_ten_minutes() -> None:
    long = [page.relative_to(DOCS).as_posix() for page in PAGES if words(page.read_text(encoding="utf-8")) > WORDS]
    assert long == [], "split the page by task"


def test_the_site_stays_small() -> None:
    assert len(SITE) <= SITE_PAGES, (
        f"docs/ has {len(SITE)} pages for users, and {SITE_PAGES} are allowed: make the new page a section of the page "
        "whose task it belongs to, or merge two short pages that are read together"
    )
    counts = {page.relative_to(DOCS).as_posix(): len(page.read_text(encoding="utf-8").split()) for page in SITE}
    longest = sorted(counts, key=counts.__getitem__, reverse=True)[:5]
    assert sum(counts.values()) <= SITE_WORDS, (
        f"the pages for users have {sum(counts.values()):,} words, and {SITE_WORDS:,} are allowed: remove what is said "
        f"twice, or move what only maintainers need to docs/maintainers. The longest pages are {', '.join(longest)}"
    )


def test_the_first_pages_say_whether_the_version_is_released() -> None:
    unreleased = re.search(
        r"^## \[(\d+\.\d+)\.\d+\] - unreleased$", (DOCS.parent / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    for page in (DOCS.parent / "README.md", DOCS / "index.md"):
        said = re.findall(r"version (\d+\.\d+), which is not released yet", page.read_text(encoding="utf-8"))
        assert said == ([unreleased[1]] if unreleased else []), page


def test_every_guarantee_names_tests_that_exist() -> None:
    rows = promises()
    assert len(rows) > 10 and [row for row in rows if not named(row)] == []
    assert missing(GUARANTEES) == []


def test_make_test_runs_a_test_of_every_guarantee_and_make_gate_those_that_are_marked() -> None:
    for row in promises():
        tests = re.findall(r"`([a-z_/]+\.py)::(test_\w+)`( †)?", row)
        assert [name for file, name, _ in tests if left_out(file, name)] == [], row
        assert [bool(mark) for *_, mark in tests] == [is_slow(file, name) for file, name, _ in tests], row
        assert not all(mark for *_, mark in tests), row


def promises() -> list[str]:
    """The rows of what the page of guarantees promises."""
    promised = GUARANTEES.split("\n## Promised\n", 1)[1].split("\n## ", 1)[0]
    return [line for line in promised.splitlines() if line.startswith("| ")][1:]


def test_every_block_of_code_begins_and_ends_on_a_line_of_its_own() -> None:
    """If a reflowed paragraph swallows the fence of a block, no test reads the block, and no reader can copy it."""
    wrong = {
        (page.relative_to(DOCS.parent).as_posix(), line)
        for page in [*DOCS.parent.glob("*.md"), *DOCS.rglob("*.md")]
        for line in page.read_text(encoding="utf-8").splitlines()
        if "```" in line and not re.fullmatch(r" *```(\w*|\{[\w-]+\}( \w+)?)", line)
    }
    assert wrong == set()


# `tests/test_operator_documents.py` parses the commands of these pages.
COVERED = {*FOR_OPERATORS, *FOR_DATA_TEAMS, *AROUND}
COMMANDS = {path.stem for path in command_files()}


def examples(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_every_example_compiles() -> None:
    for page in PAGES:
        for text in examples(page):
            compile(text, page.as_posix(), "exec")


def test_every_command_has_its_arguments() -> None:
    assert configured.OUTBOX
    lines = [
        line
        for page in PAGES
        if page not in COVERED
        for line in "\n".join(examples(page, "sh")).replace("\\\n", " ").splitlines()
    ]
    for line in lines:
        if found := re.search(r"manage\.py (outbox_\w+)([^|]*)", line):
            assert found[1] in COMMANDS, line
            parser = load_command_class(app_of(found[1]), found[1]).create_parser("manage.py", found[1])
            parser.parse_args(shlex.split(found[2], comments=True))


def test_a_guide_shows_the_code_before_and_after() -> None:
    guides = (DOCS / "migration.md").read_text(encoding="utf-8").split("\n## From ")[1:]
    assert len(guides) == 5
    for guide in guides:
        shown = re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
        before = [text for text in shown if text.startswith("# before: ")]
        assert before and len(before) < len(shown), guide[:40]
