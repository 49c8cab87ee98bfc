"""An open page shows since when it is out of date, for any cause, and recovers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import outbox
from outbox.contrib.console import urls
from tests.django.broker_world import World
from tests.django.console.web_process import WebProcess, web_process
from tests.django.operators import ALL, make_user
from tests.sample.browser import Browser

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("no_subscribers")]

STALE = "document.querySelector('#live').classList.contains('stale')"


@pytest.fixture
def web(world: World) -> Iterator[WebProcess]:
    with web_process(make_user(*ALL)) as web:
        yield web


def wait_until_stale(browser: Browser, reason: str) -> None:
    """The page is grey, and shows since when and why."""
    browser.wait_for(STALE)
    browser.wait_for(f"document.querySelector('.stale-note:not([hidden])')?.textContent.includes({reason!r})")
    note = browser.text(".stale-note:not([hidden])")
    assert re.fullmatch(rf"Not updated since \d\d:\d\d:\d\d: {re.escape(reason)}.*\.", note), note


def wait_until_fresh(browser: Browser) -> None:
    """Nothing is grey."""
    browser.wait_for("document.querySelectorAll('.stale, .stale-note:not([hidden])').length === 0")


@pytest.mark.slow
def test_a_web_process_that_hangs_or_is_killed_greys_the_page(web: WebProcess) -> None:
    with Browser() as browser:
        web.site.open(browser)
        wait_until_fresh(browser)
        web.freeze()
        wait_until_stale(browser, "the server does not answer")
        web.freeze(frozen=False)
        wait_until_fresh(browser)
        web.kill()
        wait_until_stale(browser, "the server cannot be reached")
        web.start()
        wait_until_fresh(browser)


@pytest.mark.slow
def test_a_permission_that_is_gone_greys_and_an_ended_session_leaves(web: WebProcess) -> None:
    user = web.site.user
    with Browser() as browser:
        web.site.open(browser)
        user.is_staff = False
        user.save()
        wait_until_stale(browser, "the server answers with 403")
        assert "No fault at" in browser.text("#live"), "the refusal is not put into the page"
        user.is_staff = True
        user.save()
        wait_until_fresh(browser)
        browser.evaluate("document.cookie = 'sessionid=; path=/; max-age=0'")
        browser.wait_for(
            "location.pathname === '/accounts/login/' && decodeURIComponent(location.search) === '?next=/outbox/'"
        )


@pytest.mark.slow
def test_updates_continue_under_the_focus_and_keep_it(web: WebProcess, world: World) -> None:
    world.limits(LAG_MESSAGES=(1, None))
    for group in ("mail", "stock"):
        world.subscribe(group)
    world.publish(1)
    with Browser() as browser:
        web.site.open(browser, "/outbox/groups/")
        link = "document.querySelector('#live a[href$=\"name=stock\"]')"
        browser.evaluate(f"(window.link = {link}).focus()")
        world.subscribe("analytics")
        world.publish(1)
        browser.wait_for("document.querySelector('#live').innerText.includes('analytics')")
        assert browser.evaluate("document.activeElement === window.link && window.link.isConnected")
        assert browser.evaluate("window.link.textContent") == "stock"
        rows = browser.evaluate("[...document.querySelectorAll('tbody th')].map(one => one.innerText)")
        assert rows == ["analytics", "mail", "stock"]
        browser.evaluate("document.querySelector('[name=q]').focus()")
        browser.command("Input.insertText", text="anal")
        world.subscribe("billing")
        browser.wait_for("document.querySelector('#live').innerText.includes('billing')")
        assert browser.evaluate("document.activeElement.value") == "anal"
        world.sql("DELETE FROM outbox.subscription")
        world.sql("DELETE FROM outbox.consumer_group WHERE name = 'stock'")
        browser.wait_for("!document.querySelector('#live').innerText.includes('stock')")


@pytest.mark.slow
def test_paused_and_selected_pages_show_since_when(web: WebProcess, world: World) -> None:
    with Browser() as browser:
        web.site.open(browser)
        browser.evaluate("getSelection().selectAllChildren(document.querySelector('.verdict'))")
        wait_until_stale(browser, "text in it is selected")
        browser.evaluate("getSelection().empty()")
        wait_until_fresh(browser)
        browser.evaluate("document.querySelector('#pause').click()")
        wait_until_stale(browser, "updates are paused")
        world.sql("UPDATE outbox.broker SET reject_transactional = true")
        browser.evaluate("document.querySelector('#pause').click()")
        browser.wait_for("document.querySelector('#announce').textContent.includes('1 warning')")
        wait_until_fresh(browser)


def test_nothing_that_is_typed_into_is_in_what_is_replaced() -> None:
    folder = Path(outbox.__file__).parent
    live = [text for path in folder.rglob("templates/**/*.html") if 'id="live"' in (text := path.read_text())]
    assert len(live) == 4
    assert not any(one.choice for one in urls.LISTED if one.is_live)
    for text in live:
        part = text.partition('<div id="live"')[2].partition("{% endblock %}")[0]
        # The buttons of actions have no typed text, and lead to a page that shows the plan.
        assert not re.findall(r"<(form|input|button|select|textarea|dialog)|{% action_form ", part)
