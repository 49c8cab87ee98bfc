"""The bytes per message, small, and the formula and examples of the page about sizing."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from benchmarks import results
from benchmarks.results import Results
from benchmarks.sizing_plan import (
    APPLICATION,
    ATOMIC,
    BOTH,
    BROKER,
    BYTES,
    DATABASE_OF,
    ONE,
    PHASES,
    TWO_PHASE,
    WAL,
    plan,
)
from tests.benchmarks.support import number, tables
from tests.documents import DOCS, text_of

PAGE = text_of(DOCS / "operations" / "sizing.md")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sizing_small() -> None:
    """Each database has the WAL of its tables, and about as many bytes as the page says."""
    found = tables("sizing", OUTBOX_BENCH_MESSAGES="2000")
    *of_tables, wal = found.values()
    stored = results.load("sizing")
    assert stored is not None and [one["title"] for one in stored.tables] == list(found)
    for rows, path, one in zip(of_tables, (TWO_PHASE, ATOMIC), stored.tables, strict=False):
        names = [row["table"] for row in rows]
        assert names == [name for name in DATABASE_OF if path == TWO_PHASE or name != "outbox_ledger"]
        for row, written in zip(rows, one["rows"], strict=True):
            assert number(row["disk"]) == pytest.approx(number(row["rows"]) + number(row["indexes"]), abs=1)
            # A page of a small table more or less is a tenth of what the page says.
            least, most = 0.75 * number(written[3]), 1.25 * number(written[3])
            if row["table"] == "outbox_inbox":
                # Several sessions insert, each into pages of its own, so a small table has pages that are half empty.
                most = math.inf
            assert least <= number(row["disk"]) <= most, row
    by_database = {row["database"]: {part: number(row[part]) for part in (*PHASES, "whole life")} for row in wal}
    assert list(by_database) == [APPLICATION, BROKER, BOTH, ONE]
    for parts in by_database.values():
        assert parts["whole life"] == pytest.approx(sum(parts[part] for part in PHASES), abs=2)
    for part in PHASES:
        of_each = [by_database[one][part] for one in (APPLICATION, BROKER)]
        assert by_database[BOTH][part] == pytest.approx(sum(of_each), abs=2)
        assert min(of_each) > 0, "each database writes in each phase"
    removals = [{row["table"]: number(row["WAL of its removal"]) for row in rows} for rows in of_tables]
    of_broker = sum(value for name, value in removals[0].items() if DATABASE_OF[name] == "broker")
    assert by_database[BROKER]["removal"] == pytest.approx(of_broker, rel=0.05, abs=5)


def _stored() -> Results:
    """Figures with which each number of the formulas can be computed by hand."""
    header = ["table", "rows", "indexes", "disk", "WAL of its removal"]
    of_tables = [
        ["commit_log", "300", "50", "350", "60"],
        ["op_log", "50", "20", "70", "30"],
        ["consume_queue", "40", "20", "60", "20"],
        ["outbox_ledger", "24", "24", "48", "10"],
        ["outbox_inbox", "70", "30", "100", "5"],
    ]
    without_ledger = [row for row in of_tables if row[0] != "outbox_ledger"]
    wal: list[list[str]] = [
        [TWO_PHASE, APPLICATION, "600", "400", "15", "1,015"],
        [TWO_PHASE, BROKER, "1,000", "90", "110", "1,200"],
        [TWO_PHASE, BOTH, "1,600", "490", "125", "2,215"],
        [ATOMIC, ONE, "1,400", "480", "115", "1,995"],
    ]

    def one(title: str, names: list[str], rows: list[list[str]]) -> dict[str, Any]:
        return {"title": title, "header": names, "rows": rows}

    return Results(
        {},
        {},
        [
            one(BYTES.format(200, TWO_PHASE), header, of_tables),
            one(BYTES.format(200, ATOMIC), header, without_ledger),
            one(WAL, ["path", "database", *PHASES, "whole life"], wal),
        ],
    )


def test_each_formula_has_the_bytes_of_its_database() -> None:
    made = plan(_stored())
    assert made.formulas == {
        "broker's disk": "M x R x (280 + B) x 1.3",
        "application's disk": "M x (G x I x 100 + 2) x 1.3",
        # 1,000 - 200 for the body, and the removal of three tables.
        "broker's WAL per day": "M x (910 + B + G x 90) x 1.4",
        # The removal of the ledger once, and that of the inbox per group.
        "application's WAL per day": "M x (610 + G x 405) x 1.4",
        "atomic path, disk": "M x (R x (280 + B) + G x I x 100) x 1.3",
        "atomic path, WAL per day": "M x (1,310 + B + G x 485) x 1.4",
    }
    assert made.rows[0] == ["1 million", "12/s", "2 GB", "2 GB", "2 GB", "1 GB", "4 GB", "3 GB"]


def test_the_examples_of_the_page_are_those_of_its_formula() -> None:
    formulas = dict(re.findall(r"^([a-z', ]+(?:WAL per day|disk)) += (.+)$", PAGE, re.MULTILINE | re.IGNORECASE))
    rows = re.findall(r"^\| (\d+) million \| [\d,]+/s \| (.+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3 and len(formulas) == 6
    body = re.search(r"^For bodies of (\d+) bytes", PAGE, re.MULTILINE)
    assert body is not None
    for millions, written in rows:
        names = {"M": int(millions) * 10**6, "B": int(body[1]), "G": 1, "R": 3, "I": 14}
        terms = [text.replace(",", "").replace(" x ", " * ") for text in formulas.values()]
        assert [f"{eval(term, names) / 1e9:,.0f} GB" for term in terms] == written.split(" | ")
