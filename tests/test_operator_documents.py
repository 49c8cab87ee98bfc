"""The commands of the pages for operators and data teams are accepted, and code names pages and headings that exist."""

from __future__ import annotations

import argparse
import ast
import configparser
import re
import uuid
from typing import Any

import pytest
from django.core.management import CommandError, get_commands, load_command_class

from outbox.contrib.django.operations.known_conditions import catalogue
from spark import cli
from tests.django import configured
from tests.documents import (
    AROUND,
    DOCS,
    FOR_DATA_TEAMS,
    FOR_OPERATORS,
    ROOT,
    Command,
    blocks,
    commands,
    commands_in_sentences,
    text_of,
)
from tests.part_apps import command_files
from tests.test_architecture import anchors

PAGES = [*FOR_OPERATORS, *FOR_DATA_TEAMS, *AROUND]
CODE = [path for folder in ("outbox", "spark", "sample_project") for path in sorted((ROOT / folder).rglob("*.py"))]
# What a reader fills in.
PLACEHOLDERS = {"ID": str(uuid.uuid4()), "GROUP": "billing", "TOPIC": "orders", "NAME": "partner", "TIME": "2026-01-01"}
PLACEHOLDERS |= {"ALIAS": "broker"}
ALL = sorted(
    {(str(one), one) for page in PAGES for one in commands(page)}
    | {(str(one), one) for page in FOR_OPERATORS for one in commands_in_sentences(page)}
)


def parsed(given: Command) -> None:
    """Raises SystemExit or CommandError for a command line that the command does not accept."""
    # The commands of Django are found only with settings.
    assert configured.OUTBOX
    name, *words = (PLACEHOLDERS.get(word, word) for word in given.words)
    if name == "outbox-reconcile":
        cli.parser().parse_args(words)
        return
    command: Any = load_command_class(get_commands()[name], name)
    parser: argparse.ArgumentParser = command.create_parser("manage.py", name)
    parser.parse_args(words)


def test_every_command_is_accepted() -> None:
    refused = []
    for name, given in ALL:
        try:
            parsed(given)
        except (SystemExit, CommandError) as error:
            refused.append((name, str(error)))
    assert len(ALL) > 100 and refused == []


def test_every_command_of_outbox_is_on_a_page() -> None:
    named = {one.words[0] for _, one in ALL}
    # docs/schedules.md, docs/events.md and docs/engines.md have them.
    assert {path.stem for path in command_files()} - named == {"outbox_schedule", "outbox_contract", "outbox_relay"}


def test_a_wrong_command_is_found() -> None:
    for words in (("outbox_group", "halt", "billing"), ("outbox-reconcile", "run", "--rulez", "x")):
        with pytest.raises((SystemExit, CommandError)):
            parsed(Command(DOCS, words))


def test_files_and_code_can_be_read() -> None:
    for page in PAGES:
        for code in blocks(page, "python"):
            # An example leaves the other settings out, or is one of them.
            complete = re.sub(r"\.\.\.,?\s*", "", code)
            ast.parse(complete if not complete.startswith('"') else f"{{{complete}}}", page.name)
        for code in blocks(page, "ini"):
            configparser.ConfigParser().read_string(code, page.name)


def test_every_condition_has_a_first_step() -> None:
    named = re.findall(r"`(\w+)`", text_of(DOCS / "operations" / "index.md"))
    assert set(catalogue()) - set(named) == set()


# -- what the code names ---------------------------------------------------------------------------


def named_in_code() -> set[tuple[str, str, str]]:
    """(file, page, heading or '') of the pages that texts and comments name; of another language, `N` is a number."""
    found = set()
    for path in CODE:
        text = re.sub(r'"\n\s+f?"', "", path.read_text(encoding="utf-8"))
        for page, heading in re.findall(r"\b(docs/[\w/.-]+?\.md)(?:#([\w-]+))?", text):
            found.add((path.relative_to(ROOT).as_posix(), page, heading))
    return found


def test_what_the_code_names_is_a_page_with_this_heading() -> None:
    found = named_in_code()
    assert len(found) > 20
    for file, page, heading in sorted(found):
        assert (ROOT / page).is_file(), f"{file} names {page}"
        assert not heading or heading in anchors(ROOT / page), f"{file} names {page}#{heading}"
