"""Makes the screenshot of the documents: `python -m tests.sample.screenshot ADDRESS docs/images/operations.png`.

ADDRESS is that of the shop that `make demo KEEP=1` leaves open, with the slash at its end. The picture shows a real
condition: an operator has paused the group `points`, and customers have paid their orders since.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from tests.sample.browser import Browser

_GROUP = "points"
_ORDERS = 3


def take(address: str, target: Path) -> None:
    """Store a picture of the overview while a group is paused, then resume the group."""
    with Browser(width=1280, height=1000, timeout=60) as browser:
        _log_in(browser, address)
        _act(browser, address, "pause", "the price list of the points is wrong")
        for _ in range(_ORDERS):
            _order(browser, address)
        browser.goto(f"{address}operations/")
        browser.wait_for("document.querySelector('[data-key=group_paused]') !== null")
        browser.wait_for("[...document.querySelectorAll('.chart')].every(e => e.plot)")
        answer = browser.command("Page.captureScreenshot", format="png")
        target.write_bytes(base64.b64decode(answer["data"]))
        _act(browser, address, "resume", "the price list is right")


def _log_in(browser: Browser, address: str) -> None:
    browser.goto(f"{address}login/")
    browser.evaluate("document.querySelector('[name=username]').value = 'operator'")
    browser.evaluate("document.querySelector('[name=password]').value = 'operator'")
    browser.click("form button")


def _act(browser: Browser, address: str, action: str, reason: str) -> None:
    browser.goto(f"{address}operations/groups/one/?name={_GROUP}")
    browser.click(f"form[action$='/{action}/'] button")
    browser.evaluate(f"document.querySelector('#why').value = {reason!r}")
    browser.click("form.confirm button")


def _order(browser: Browser, address: str) -> None:
    browser.goto(address)
    browser.click("button[value='ink']")
    browser.goto(f"{address}cart/")
    browser.click("button.strong")
    browser.click(".pay button.strong")


if __name__ == "__main__":
    take(sys.argv[1], Path(sys.argv[2]))
