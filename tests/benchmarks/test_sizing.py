"""The bytes per message, small, and the examples of the page about sizing."""

from __future__ import annotations

import re

import pytest

from tests.benchmarks.support import number, tables
from tests.documents import DOCS, text_of

PAGE = text_of(DOCS / "operations" / "sizing.md")
BYTES = PAGE.partition("## Bytes of a message\n")[2].partition("\n## ")[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sizing_small() -> None:
    rows, (wal,) = tables("sizing", OUTBOX_BENCH_MESSAGES="5000").values()
    assert [row["table"] for row in rows] == re.findall(r"^\| `(\w+)`", BYTES, re.MULTILINE)
    for row in rows:
        assert number(row["disk"]) == pytest.approx(number(row["rows"]) + number(row["indexes"]), abs=1)
        # A tenth of what the page says is a page of a small table more or less.
        written = re.search(rf"^\| `{row['table']}`.*?\| (\d+) \| (\d+) \| (\d+) \|", BYTES, re.MULTILINE)
        assert written is not None
        assert number(row["disk"]) == pytest.approx(int(written[3]), rel=0.25)
    parts = ("order, publish, queue", "handle", "removal")
    assert number(wal["whole life"]) == pytest.approx(sum(number(wal[part]) for part in parts), abs=2)


def test_the_examples_of_the_page_are_those_of_its_formula() -> None:
    formulas = dict(re.findall(r"^(broker's disk|application's disk|WAL per day) += (.+)$", PAGE, re.MULTILINE))
    rows = re.findall(r"^\| (\d+) million \| [\d,]+/s \| (\d+) GB \| (\d+) GB \| (\d+) GB \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    for millions, *written in rows:
        names = {"M": int(millions) * 10**6, "B": 287, "G": 1, "R": 3, "I": 14}
        terms = [text.replace(",", "").replace(" x ", " * ") for text in formulas.values()]
        assert [f"{eval(term, names) / 1e9:.0f}" for term in terms] == written
