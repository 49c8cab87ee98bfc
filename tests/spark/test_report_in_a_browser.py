"""The report as people see it, at a desk and on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spark.judging.remedies import REMEDIES
from spark.rules.rule import FindingClass
from tests.sample.browser import Browser
from tests.spark.test_report import finding, page

pytestmark = [pytest.mark.browser, pytest.mark.slow]

RIGHT_EDGE = "Math.max(...[...document.querySelectorAll('{}')].map(each => each.getBoundingClientRect().right))"


def found() -> dict[str, Any]:
    """A finding with everything, its evidence open to be read."""
    remedy = REMEDIES[FindingClass.UNDELIVERED]
    text = f"Check first: {remedy.check} Then: {remedy.settle}"
    return {**finding("01a202f2-5fd4-7b8d-af32-bfa2220cf44e"), "remedy": text}


@pytest.mark.parametrize("width", [1280, 390])
def test_what_to_do_about_a_finding_is_read_without_scrolling_sideways(tmp_path: Path, width: int) -> None:
    path = tmp_path / "report.html"
    path.write_text(page([found()], MISMATCH=1)[0])
    with Browser(width=width) as browser:
        browser.goto(path.as_uri())
        browser.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(RIGHT_EDGE.format(".found > tbody > tr > td, .remedy p, .more dd > code, pre")) <= width
        commands = browser.evaluate("[...document.querySelectorAll('.remedy p code')].map(each => each.innerText)")
    assert commands[0] == "python manage.py outbox_group offsets {group}", "commands can be told from the sentence"
