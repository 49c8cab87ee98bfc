"""The page in Chromium: an operator's actions, at any width, accessible, and with hostile content."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest

from outbox.broker.operations import summary
from outbox.contrib.console import rendering
from outbox.contrib.django import publish
from outbox.contrib.django.models import OperatorAction
from outbox.contrib.reconciliation.models import Finding
from tests.django.broker_world import World
from tests.django.console.support import Site
from tests.django.console.test_settling import decision, lost_end
from tests.django.operators import blocked, bury, retried, working
from tests.django.support import sequence
from tests.sample.browser import Browser

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("no_subscribers")]

AXE: Final = (Path(__file__).parent / "vendor" / "axe.min.js").read_text(encoding="utf-8")
HOSTILE: Final = "\"'><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>{{ 7 }}\u202e\x1b[2J"
PAGES: Final = (
    *("", "messages/", "undecided/", "dead-letters/", "dead-letters/list/?group=mail", "waiting/", "groups/"),
    *("waiting/?retrying=yes", "groups/?state=behind", "groups/one/?name=mail&topic=orders", "groups/one/?name=books"),
    "schedules/",
    *("workers/", "topics/", "topics/one/?name=orders", "findings/", "incidents/", "audit/"),
)


def busy(world: World) -> list[str]:
    """A broker with rows on every page, hostile in the texts that come from outside; returns the pages."""
    for group in ("mail", "stock", "points"):
        world.subscribe(group)
    blocked(world, "books", error=f"ValueError: {HOSTILE}")
    message_id = publish(
        "orders", {"name": HOSTILE}, key=HOSTILE, tag="paid", headers={"h": HOSTILE}, at_once=True
    ).message_id
    publish("orders", {}, key="order-7", at_once=True)
    publish("reminders", {"name": HOSTILE}, key=HOSTILE, delay=3600, at_once=True)
    sequence()
    bury(world, "mail", HOSTILE, f"ValueError: {HOSTILE}")
    retried(world, "stock", "order-7", f"ValueError: {HOSTILE}")
    working(world, "mail", message_id)
    Finding.objects.create(output="o", run="r", rule=HOSTILE, finding_class="LOST", severity="critical", key=HOSTILE)
    entry = OperatorAction.objects.create(who=HOSTILE, why=HOSTILE, action="pause", subject=HOSTILE, effect=HOSTILE)
    world.sql(
        "INSERT INTO outbox.incident (kind, subject, detail) VALUES ('refused', %s, %s)",
        HOSTILE, HOSTILE,
    )  # fmt: skip
    for _ in range(3):
        summary.refresh(world.run)
    undecided = world_half(world)
    return [*PAGES, f"messages/{message_id}/", f"messages/{undecided}/", f"audit/{entry.pk}/"]


def world_half(world: World) -> UUID:
    world.half()
    [(found,)] = world.sql("SELECT transaction_id FROM outbox.pending_check")
    world.sql("UPDATE outbox.pending_check SET last_answer = %s", HOSTILE)
    transaction_id: UUID = found
    return transaction_id


def settled(browser: Browser) -> None:
    """Wait until what the scripts draw is drawn."""
    browser.wait_for("[...document.querySelectorAll('.chart')].every(e => e.plot)")


def faults(browser: Browser) -> list[str]:
    """The accessibility faults that axe finds, the minor ones too."""
    browser.evaluate(f"{AXE}; undefined")
    found: list[dict[str, Any]] = browser.evaluate("axe.run().then(found => found.violations)")
    return [f"{one['id']}: {one['help']}: {[node['html'][:200] for node in one['nodes'][:3]]}" for one in found]


def confirm(browser: Browser, why: str) -> None:
    """Give the reason and do it."""
    browser.evaluate(f"document.querySelector('#why').value = {why!r}")
    browser.click("form.confirm button")


@pytest.mark.slow
@pytest.mark.parametrize(
    "look",
    [
        pytest.param({}, id="light"),
        pytest.param({"dark": True}, id="dark", marks=pytest.mark.soak),
        pytest.param({"width": 320, "height": 740}, id="phone", marks=pytest.mark.soak),
        pytest.param({"width": 320, "height": 740, "dark": True}, id="dark-phone", marks=pytest.mark.soak),
        pytest.param({"width": 768, "height": 1024}, id="tablet", marks=pytest.mark.soak),
        pytest.param({"width": 1920, "height": 1080}, id="wide", marks=pytest.mark.soak),
    ],
)
def test_pages_are_inert_and_fit_and_axe_finds_nothing(
    world: World, site: Site, look: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """With OUTBOX_SCREENSHOTS=FOLDER, it also stores a picture of each page."""
    pages = busy(world)
    folder = os.environ.get("OUTBOX_SCREENSHOTS")
    with Browser(**look) as browser:
        for page in pages:
            site.open(browser, f"/outbox/{page}")
            settled(browser)
            assert browser.evaluate("window.hacked === undefined && !document.querySelector('main img, main script')")
            assert "\u202e" not in browser.text() and "\x1b" not in browser.text(), page
            assert browser.evaluate("document.documentElement.scrollWidth") <= look.get("width", 1280), page
            assert faults(browser) == [], page
            # The menu is one row; on a phone it scrolls sideways.
            assert look.get("width") == 768 or browser.evaluate("document.querySelector('.top ul').clientHeight") < 60
            if folder:
                name = re.sub(r"[^a-z0-9]+", "-", page.lower()[:60]).strip("-") or "overview"
                browser.screenshot(Path(folder) / f"{request.node.callspec.id}-{name}.png")


LISTS: Final = (
    "messages/",
    "undecided/",
    "dead-letters/",
    "waiting/",
    "groups/",
    "workers/",
    "topics/",
    "audit/",
)


@pytest.mark.slow
def test_a_message_is_skipped_with_the_keyboard_alone(world: World, site: Site) -> None:
    bad = blocked(world, "books")
    with Browser() as browser:
        site.open(browser)
        tab_to(browser, "document.activeElement.textContent === 'Skip this message …'")
        press(browser, "Enter", 13, "\r")
        browser.wait_for("document.querySelector('#why') !== null")
        assert str(bad) in browser.text("main")
        tab_to(browser, "document.activeElement.id === 'why'")
        browser.command("Input.insertText", text="the order is void")
        tab_to(browser, "document.activeElement.textContent === 'Do it'")
        press(browser, "Enter", 13, "\r")
        browser.wait_for("document.querySelector('main').innerText.includes('the order is void')")
    assert OperatorAction.objects.get().outcome == "done"


def press(browser: Browser, key: str, code: int, text: str = "") -> None:
    """Press and release a key."""
    given: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
    browser.command("Input.dispatchKeyEvent", type="keyDown", **given, **({"text": text} if text else {}))
    browser.command("Input.dispatchKeyEvent", type="keyUp", **given)


def tab_to(browser: Browser, condition: str) -> None:
    """Press the tabulator until a condition about the focused element holds."""
    for _ in range(200):
        press(browser, "Tab", 9)
        if browser.evaluate(condition):
            return
    raise AssertionError(f"the keyboard does not reach: {condition}")


@pytest.mark.slow
def test_the_checks_find_what_they_look_for(world: World, site: Site) -> None:
    with Browser(width=360, height=740) as browser:
        site.open(browser)
        browser.evaluate("document.querySelector('main').insertAdjacentHTML('beforeend', '<img src=x>')")
        assert any("image-alt" in one for one in faults(browser))
        browser.evaluate("document.querySelector('h1').style.width = '900px'")
        assert browser.evaluate("document.documentElement.scrollWidth") > 360


@pytest.mark.slow
def test_a_strict_policy_is_kept_and_keeps_out_what_is_foreign(
    world: World, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(rendering, "REFRESH_SECONDS", 0.5)
    busy(world)
    with Browser() as browser:
        browser.command(
            "Page.addScriptToEvaluateOnNewDocument",
            source="window.broken = []; addEventListener('securitypolicyviolation', e => broken.push(e.blockedURI))",
        )
        site.open(browser)
        settled(browser)
        browser.wait_for(
            "performance.getEntriesByType('resource').some(one => new URL(one.name).pathname === '/outbox/')"
        )
        assert browser.evaluate("broken.length") == 0
        assert browser.evaluate("getComputedStyle(document.body).margin") == "0px", "its own style is used"
        browser.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'hacked = 1'}))"
        )
        assert browser.evaluate("window.hacked === undefined && broken.length === 1")


def test_it_goes_without_scripts(world: World, site: Site) -> None:
    lost_end(world)
    client_page = "/outbox/undecided/"
    with Browser() as browser:
        site.open(browser, client_page)
        browser.command("Emulation.setScriptExecutionDisabled", value=True)
        browser.goto(f"{site.url}{client_page}")
        browser.click("button.good")
        confirm(browser, "without scripts")
    assert decision(world) == [("C", "O")]
