"""docs/maintainers/storage.md lists every table, as installed, and every file that takes an explicit lock."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import psycopg
import pytest
from django.apps import apps

from outbox import hooks
from tests.django import configured
from tests.house.parts import PARTS

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "maintainers" / "storage.md").read_text(encoding="utf-8")
LOCKS = re.compile(
    r"FOR (?:NO KEY )?UPDATE|FOR SHARE|LOCK TABLE|pg_(?:try_)?advisory\w*\(|select_for_update\(", re.MULTILINE
)


def section(title: str) -> str:
    """The text below a heading, to the next one."""
    found = re.search(rf"^#+ {title}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def tables_of_the_page(title: str) -> list[str]:
    """The first column of a table with four full ones."""
    rows = [line.strip("|").split("|") for line in section(title).splitlines() if line.startswith("| `")]
    assert all(len(row) == 4 and all(cell.strip() for cell in row) for row in rows)
    return [row[0].strip(" `") for row in rows]


def assert_listed(title: str, tables: Counter[str]) -> None:
    """The page lists these tables, and others only if this tree lacks a part."""
    listed = Counter(tables_of_the_page(title))
    assert tables - listed == Counter()
    if all((ROOT / "outbox" / path).exists() for part in PARTS for path in part.paths):
        assert listed == tables


def lock_takers() -> set[str]:
    """The files that lock a table by name, besides the locks that every statement takes."""
    files = [path for folder in ("outbox", "spark") for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {
        path.relative_to(ROOT).as_posix()
        for path in files
        if path.suffix in (".py", ".sql") and LOCKS.search(path.read_text(encoding="utf-8"))
    }


@pytest.mark.whole
def test_the_page_lists_the_tables_of_the_installed_schema(broker_url: str) -> None:
    with psycopg.connect(broker_url) as connection:
        rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'outbox'").fetchall()
    assert_listed("The broker's schema", Counter(name for (name,) in rows))


@pytest.mark.whole
def test_the_page_lists_the_tables_of_the_application() -> None:
    assert configured.OUTBOX
    models = [model for label in ("outbox", *hooks.tables) for model in apps.get_app_config(label).get_models()]
    assert_listed("The application's databases", Counter(model._meta.db_table for model in models))


def test_the_page_names_every_file_that_takes_a_lock() -> None:
    takers, named = lock_takers(), set(re.findall(r"`((?:outbox|spark)/[^`:]+\.(?:py|sql))", section("Locks")))
    assert len(takers) >= 20
    assert takers - named == set()
