"""The income per minute: three stages behind each other, run by processes that were killed, and its page."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from tests.sample.browser import Browser
from tests.sample.conftest import ORDERS, DemoRun

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CELLS = "[...document.querySelectorAll('.scroll tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))"


def test_every_paid_order_is_in_its_minute(open_demo: DemoRun) -> None:
    """The demo has compared each minute with the orders table; the page shows the same sums."""
    with Browser() as browser:
        browser.goto(f"{open_demo.site}/income/")
        rows = browser.evaluate(CELLS)
        assert sum(int(orders) for _, orders, _ in rows) >= ORDERS / 2, "most orders of the demo are paid"
        assert all(Decimal(income.removeprefix("€ ")) > 0 for _, _, income in rows)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_plot_is_drawn_from_files_of_the_site(open_demo: DemoRun, tmp_path: Path, width: int, dark: bool) -> None:
    with Browser(width=width, dark=dark) as browser:
        browser.goto(f"{open_demo.site}/income/")
        browser.wait_for("document.querySelector('#income-plot canvas')?.width > 0")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        sources = browser.evaluate("performance.getEntriesByType('resource').map(entry => new URL(entry.name).origin)")
        assert set(sources) == {open_demo.site}
        browser.screenshot(tmp_path / "income.png")
        assert (tmp_path / "income.png").stat().st_size > 10_000
