"""Makes the screenshot of the README: `python -m tests.sample.screenshot ADDRESS docs/images/operations.png`.

ADDRESS is that of the shop that `make demo KEEP=1` leaves open, with the slash at its end.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from tests.sample.browser import Browser


def take(address: str, target: Path) -> None:
    """Log in as the demo's operator and store a picture of the operations page."""
    with Browser(width=1280, height=760, timeout=60) as browser:
        browser.goto(f"{address}login/")
        browser.evaluate("document.querySelector('[name=username]').value = 'operator'")
        browser.evaluate("document.querySelector('[name=password]').value = 'operator'")
        browser.click("form button")
        browser.goto(f"{address}operations/")
        browser.wait_for("document.querySelectorAll('.uplot canvas').length >= 2")
        answer = browser.command("Page.captureScreenshot", format="png")
        target.write_bytes(base64.b64decode(answer["data"]))


if __name__ == "__main__":
    take(sys.argv[1], Path(sys.argv[2]))
