"""The order page in a real browser, with and without JavaScript."""

from __future__ import annotations

import pytest

from tests.sample.browser import Browser
from tests.sample.conftest import DemoRun

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def _order_something(browser: Browser, site: str) -> None:
    browser.goto(f"{site}/")
    browser.click("button[value='fountain-pen']")
    browser.click("button[value='ink']")
    browser.goto(f"{site}/cart/")
    assert "€ 64.80" in browser.text("main")
    browser.click("button.strong")
    assert "Awaiting payment" in browser.text("main")


def _done(browser: Browser) -> list[str]:
    found: list[str] = browser.evaluate("[...document.querySelectorAll('.step.done')].map(e => e.dataset.step)")
    return found


def test_four_states_arrive_on_the_page_by_its_script(open_demo: DemoRun) -> None:
    with Browser() as browser:
        _order_something(browser, open_demo.site)
        assert _done(browser) == []
        browser.click(".pay button.strong")
        # The script replaces the list in place; this mark would not survive a reload.
        browser.evaluate("window.sameDocument = true")
        browser.wait_for("document.querySelector('.steps').dataset.complete === 'true'")
        assert browser.evaluate("window.sameDocument") is True
        assert _done(browser) == ["orders", "logistics", "points", "cart"]
        assert "64 credited, 64 in all" in browser.text(".steps")
        browser.goto(f"{open_demo.site}/cart/")
        assert "There is nothing in your cart" in browser.text("main")
