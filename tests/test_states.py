"""docs/maintainers/states.md names every state of a message, the actor that ends it and the tests that show it.

Compared with the tests, and with the tables in which something about a message is kept.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_conformance import functions

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "maintainers" / "states.md").read_text(encoding="utf-8")
SCHEMA = (ROOT / "outbox" / "broker" / "schema" / "current.sql").read_text(encoding="utf-8")
SECTION = "States of a message"
COLUMNS = ["state", "where", "ended by", "within", "test"]
# Tables that record something about a message and are no state of it.
HISTORIES = {"failure", "check_history"}


def table(page: str) -> list[dict[str, str]]:
    """The rows of the section."""
    section = page.split(f"\n## {SECTION}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line] for line in lines]
    assert header == COLUMNS
    return [dict(zip(header, row, strict=True)) for row in rows]


def named_tests(cell: str) -> list[str]:
    return re.findall(r"`(tests/[a-z_/]+\.py::test_\w+)`", cell)


def is_there(test: str) -> bool:
    path, _, name = test.partition("::")
    return name in functions(ROOT / path)


def tables_about_messages(schema: str) -> set[str]:
    """The tables with a column that names the message or transaction of a row."""
    found = re.findall(r"^CREATE TABLE (\w+) \((.*?)^\);", schema, re.MULTILINE | re.DOTALL)
    return {
        name for name, columns in found if re.search(r"^\s+(?:log_id|log_ids|transaction_id) ", columns, re.MULTILINE)
    }


ROWS = table(PAGE)


def test_every_state_names_what_ends_it_and_when_and_is_tested() -> None:
    for row in ROWS:
        assert all(row.values()), row
        tests = named_tests(row["test"])
        assert tests and ", ".join(f"`{test}`" for test in tests) == row["test"], row["state"]
        assert [test for test in tests if not is_there(test)] == [], row["state"]


def test_no_state_is_named_twice() -> None:
    states = [row["state"] for row in ROWS]
    assert len(set(states)) == len(states) >= 25


def test_every_table_that_keeps_something_about_a_message_is_in_the_table() -> None:
    where = " ".join(row["where"] for row in ROWS)
    tables = tables_about_messages(SCHEMA)
    assert {"commit_log", "op_log", "scheduled", "held", "dead_letter", "pending_check"} <= tables
    assert {name for name in tables - HISTORIES if f"`{name}`" not in where} == set()


def test_the_checks_themselves_notice() -> None:
    assert not is_there("tests/test_states.py::test_gone")
    assert not is_there("tests/gone.py::test_gone")
    assert tables_about_messages(
        "CREATE TABLE one (\n    log_id bigint NOT NULL\n);\nCREATE TABLE two (\n    name text\n);"
    ) == {"one"}
