"""docs/maintainers/names.md lists every public name, and nothing that is not there."""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

from django.utils.module_loading import import_string

import outbox.contrib.django
from outbox import errors
from outbox.contrib.django.settings.conf import TopicOptions
from outbox.contrib.django.settings.definition import definitions
from tests.django import configured
from tests.house.tables import SETTINGS
from tests.libraries import NEEDED_BY
from tests.part_apps import command_files
from tests.test_definitions import variables_that_are_read

PAGE = Path(__file__).resolve().parent.parent / "docs" / "maintainers" / "names.md"
BY_PATH = "By their paths"


def names_of_the_page() -> dict[str, list[str]]:
    """Section -> the names in the first column of its table."""
    sections: dict[str, list[str]] = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        sections[title.replace("`", "")] = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    return sections


def names_of_the_code() -> dict[str, set[str]]:
    """Section -> what the code offers."""
    scripts = importlib.metadata.entry_points(group="console_scripts")
    ours = {script.name for script in scripts if script.value.split(".")[0] in ("outbox", "outbox_spark")}
    return {
        "outbox": set(outbox.__all__),
        "outbox.contrib.django": set(outbox.contrib.django.__all__),
        "Settings: OUTBOX": {one.name for kind in SETTINGS for one in definitions(kind).values()},
        'Options of a topic: OUTBOX["TOPICS"][name]': {item.name for item in fields(TopicOptions)},
        "Environment variables": variables_that_are_read(),
        "Commands": {path.stem for path in command_files()} | ours,
        "Errors: outbox.errors": {
            name
            for name, value in vars(errors).items()
            if isinstance(value, type) and value.__module__ == errors.__name__
        },
    }


def test_page_and_code_have_the_same_names() -> None:
    pages = names_of_the_page()
    for section, names in names_of_the_code().items():
        page, code = Counter(pages[section]), Counter(names)
        assert code, f"{section}: a section of nothing would agree with an empty page"
        assert sorted((page - code).elements()) == [], f"{section}: names that the code has not, or names twice"
        assert sorted((code - page).elements()) == [], f"{section}: the code has public names that the page lacks"


def test_every_section_is_held_against_the_code() -> None:
    assert set(names_of_the_page()) == {*names_of_the_code(), BY_PATH}


def test_names_by_path_can_be_imported() -> None:
    # Some have models, which need settings and loaded apps.
    assert configured.OUTBOX
    for path in names_of_the_page()[BY_PATH]:
        try:
            import_string(path)
        except ModuleNotFoundError as error:
            # `make install` leaves some libraries out.
            if (error.name or "").partition(".")[0] not in NEEDED_BY:
                raise


def test_every_row_of_the_page_has_a_name_and_a_word_and_often_a_meaning() -> None:
    # The meanings of settings and options are on docs/settings.md.
    rows = re.findall(r"^\| `.*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == sum(len(names) for names in names_of_the_page().values())
    assert [row for row in rows if not re.fullmatch(r"\| `\S+`( \| [^|]+){1,2} \|", row)] == []
