"""What tests read in the documents: pages, blocks of code, and commands."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

# The pages of operators and of data teams.
FOR_OPERATORS = sorted((DOCS / "operations").glob("*.md"))
FOR_DATA_TEAMS = sorted((DOCS / "reconciliation").glob("*.md"))
AROUND = [DOCS / f"{name}.md" for name in ("engines", "forwarding")]

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_PROGRAM = re.compile(r"^(?:\w+=\S+ )*(?:python )?(?:\S+/python )?manage\.py (?=\w)|^(?=outbox-reconcile )")


class Command(NamedTuple):
    """A command line of a page, without `manage.py`, comments and redirections."""

    page: Path
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.stem}: {' '.join(self.words)}"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of code of a page in a language, without the indentation of a list."""
    return [
        textwrap.dedent(code)
        for _, found, code in _BLOCK.findall(text_of(page))
        if found == language
    ]  # fmt: skip


def commands(page: Path) -> list[Command]:
    """The commands of the blocks `sh` and of the blocks without a language."""
    lines = [line for language in ("sh", "") for code in blocks(page, language) for line in _lines(code)]
    return [made for line in lines if (made := _command(page, line))]


def commands_in_sentences(page: Path) -> list[Command]:
    """The commands between backticks."""
    outside = _BLOCK.sub("", text_of(page))
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside)]
    return [made for span in spans if (made := _command(page, span.replace("\\|", "|")))]


def _lines(code: str) -> list[str]:
    """Lines, with continuation lines joined; a Procfile's without the name of the process."""
    joined = code.replace("\\\n", " ").replace(" && ", "\n")
    return [re.sub(r"^\w+: ", "", line.strip()) for line in joined.splitlines()]


def _command(page: Path, line: str) -> Command | None:
    if not (program := _PROGRAM.match(line)):
        return None
    words = shlex.split(line[program.end() :].partition(" > ")[0], comments=True)
    return Command(page, tuple(words))
