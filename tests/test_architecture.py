"""docs/maintainers/ and docs/decisions/ name modules and what they define: all of it exists."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "maintainers" / "architecture.md"
_INTERNALS = ("check-back", "consuming", "layers", "reconciliation", "states", "storage")
PAGES = [
    PAGE,
    *(ROOT / "docs" / "maintainers" / f"{name}.md" for name in _INTERNALS),
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
]
LINKING = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
# The tests that the pages name are looked for in test_states.py.
NAMED = re.compile(r"`((?:outbox|spark|sample_project)/[^`\s]*\.(?:py|sql))(?:::([A-Za-z_.]+))?`")


def named() -> list[tuple[str, str, str]]:
    """(page, path, name within it or ''), each once."""
    return sorted(
        (page.relative_to(ROOT).as_posix(), path, name)
        for page in PAGES
        for path, name in set(NAMED.findall(page.read_text(encoding="utf-8")))
    )


@functools.cache
def defined_in(path: Path) -> set[str]:
    return set(defined(ast.parse(path.read_text(encoding="utf-8"))))


def defined(module: ast.AST) -> Iterator[str]:
    """The classes and functions of a module (or class), and what they define: `Class.method`."""
    for node in ast.iter_child_nodes(module):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
            yield from (f"{node.name}.{name}" for name in defined(node))


def test_what_a_page_names_is_there() -> None:
    assert [
        (page, path, name)
        for page, path, name in named()
        if not (ROOT / path).is_file() or (name and name not in defined_in(ROOT / path))
    ] == []


def test_every_path_on_the_pages_is_checked() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    paths = {path for path in re.findall(r"`(\w+/[\w/]+\.py)\b", text) if not path.startswith("tests/")}
    assert paths - {path for _, path, _ in named()} == set()
    assert {path.split("/")[0] for path in paths} == {"outbox", "spark"}


def test_the_way_of_a_message_is_read_in_eight_files() -> None:
    section = PAGE.read_text(encoding="utf-8").split("\n## One message on the atomic path\n", 1)[1].split("\n### ")[0]
    files = dict.fromkeys(path for path, _ in NAMED.findall(section))
    assert len(files) == 8, files
    assert re.findall(r"^(\d)\. \*\*", section, re.MULTILINE) == [str(number) for number in range(1, 9)]


def test_architecture_stays_short_and_lines_fit() -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 250, "move details to docs/maintainers/"
    # A row of a table cannot be broken.
    long = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines() if len(line) > 120]
    assert [line for line in long if not line.startswith("| ")] == []


def test_links_lead_to_files_and_headings() -> None:
    links = {
        (page, target)
        for page in LINKING
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if "://" not in target
    }
    assert len(links) > 500
    assert sorted((page.name, target) for page, target in links if not leads(page, target)) == []


def leads(page: Path, target: str) -> bool:
    """Whether a link of a page leads to a file, and to a heading if it names one."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    return file.exists() and (not anchor or anchor in anchors(file))


@functools.cache
def anchors(file: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {slug(heading) for heading in headings}


def slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_index_of_the_decisions_lists_the_files() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^\| \[(\d{3})\]\(([^)]+)\) \| (.+) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    files = sorted(folder.glob("[0-9]*.md"))
    titles = [path.read_text(encoding="utf-8").splitlines()[0].partition(". ")[2] for path in files]
    assert listed == [(path.name[:3], path.name, title) for path, title in zip(files, titles, strict=True)]
    assert len(listed) <= 40, "a choice of one file is a comment there"


def test_what_was_rejected_is_said_in_short_cells() -> None:
    page = (ROOT / "docs" / "decisions" / "measured-and-rejected.md").read_text(encoding="utf-8")
    cells = [cell for line in page.splitlines() if line.startswith("| ") for cell in line.strip("| ").split(" | ")]
    assert len(cells) > 100 and [cell for cell in cells if len(cell.split()) > 15] == []


def test_what_points_to_a_decision_finds_it() -> None:
    kept = {path.name[:3] for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md")}
    files = [path for folder in ("outbox", "spark", "tests", "docs") for path in (ROOT / folder).rglob("*")]
    named = {
        (path.relative_to(ROOT).as_posix(), number)
        for path in files
        if path.suffix in (".py", ".sql", ".md") and path.name != "README.md"
        for number in re.findall(r"\b[Dd]ecisions?[ /](\d{3})\b", path.read_text(encoding="utf-8"))
    }
    assert {(path, number) for path, number in named if number not in kept} == set()
    in_code = {number for path, number in named if path.startswith(("outbox/", "spark/"))}
    assert kept - in_code == set(), "name the decision in the code that rests on it"


def test_the_glossary_is_in_alphabetical_order() -> None:
    page = (ROOT / "docs" / "maintainers" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", page.split("\n## Terms\n", 1)[1].split("\n## ")[0], re.MULTILINE)
    terms = [term.replace("`", "").lower() for term in terms if term != "term"]
    assert len(terms) > 80 and terms == sorted(set(terms))


def test_the_index_answers_the_questions_of_a_newcomer() -> None:
    page = PAGE.read_text(encoding="utf-8").split("\n## Where is ...\n", 1)[1]
    questions = " ".join(re.findall(r"^\| ([^|]+\?) \|", page, re.MULTILINE))
    asked = ["message parked", "killed its process", "add a sink", "add a condition", "tick's SQL", "column to the log"]
    asked += ["which lock", "setting validated", "inbox row", "both engines", "operator action", "list of operators"]
    asked += ["add a setting", "add a subscriber option", "add a part", "add an engine"]
    assert [words for words in asked if words not in questions] == []


def test_the_index_answers_its_questions_with_code() -> None:
    rows = re.findall(r"^\| ([^|]+\?) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 10
    assert [question for question, answer in rows if "::" not in answer] == []


def test_the_check_itself_finds_what_is_missing() -> None:
    module = ast.parse("class Here:\n    def method(self): ...")
    assert set(defined(module)) == {"Here", "Here.method"}
    assert not leads(PAGE, "nowhere.md")
    assert not leads(PAGE, "glossary.md#nowhere")
    assert leads(PAGE, "glossary.md#terms")
