"""The code of docs/hooks.md runs unchanged: middleware, Sentry, structlog, receivers."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.dispatch import Signal
from django.utils import translation

from outbox import Delivery
from outbox.contrib.django import publish, signals, subscriber
from outbox.contrib.django.operations import signals as sending
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import PermanentError
from tests.django.support import sequence

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")

with pytest.MonkeyPatch.context() as hidden:
    # Sentry imports eventlet if it is there. Then every fork of this test process warns, and a warning fails a test.
    hidden.setitem(sys.modules, "eventlet", None)
    sentry_sdk: Any = pytest.importorskip("sentry_sdk")
structlog: Any = pytest.importorskip("structlog")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hooks.md"


def connected() -> list[Signal]:
    return [getattr(signals, name) for name in signals.__all__]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of the page, from files whose names are the first lines of the code."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "shop").mkdir()
    for block in blocks:
        if named := re.match(r"# (shop/\w+\.py)\n", block):
            (tmp_path / named[1]).write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    before = {id(signal): list(signal.receivers) for signal in connected()}
    yield lambda name: importlib.import_module(f"shop.{name}")
    for signal in connected():
        signal.receivers = before[id(signal)]
        signal.sender_receivers_cache.clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "shop"]:
        del sys.modules[name]


def consume(*keys: str, headers: dict[str, str] | None = None) -> None:
    for key in keys:
        publish("orders", {}, key=key, headers=headers, at_once=True)
    sequence()
    consumer_runtime().run_once()


def test_timing_language_and_tenant(
    shop: Callable[[str], Any], outbox_settings: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    middleware = shop("middleware")
    text = PAGE.read_text(encoding="utf-8")
    [listed] = re.findall(r'"HANDLER_MIDDLEWARE": (\[.*\])', text)
    outbox_settings(HANDLER_MIDDLEWARE=re.findall(r'"([\w.]+)"', listed))
    seen = []

    @subscriber("orders", group="page")
    def handle(given: Delivery) -> None:
        seen.append((translation.get_language(), middleware.current_tenant.get()))

    with caplog.at_level(logging.INFO, logger="shop.middleware"):
        consume("1", headers={"language": "de", "tenant": "acme"})
        consume("2")
    assert seen == [("de", "acme"), ("en-us", "")]
    assert sum(" took " in one.getMessage() for one in caplog.records) == 2
    assert middleware.current_tenant.get() == "" and translation.get_language() == "en-us"


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "async"])
def test_sentry_has_one_scope_per_message(
    shop: Callable[[str], Any], outbox_settings: Callable[..., None], is_async: bool
) -> None:
    events: list[Any] = []

    class Kept(sentry_sdk.transport.Transport):  # type: ignore[misc]
        def capture_envelope(self, envelope: Any) -> None:
            events.append(envelope.get_event())

    sentry_sdk.init(dsn="https://key@localhost/1", transport=Kept, default_integrations=True)
    try:
        shop("sentry")
        outbox_settings(HANDLER_MIDDLEWARE=["shop.sentry.scope"])

        def plain(given: Delivery) -> None:
            if given.key == "good":
                sentry_sdk.set_tag("of", "good")
            else:
                raise PermanentError("no account")

        async def asynchronous(given: Delivery) -> None:
            plain(given)

        subscriber("orders", group="page", threads=1)(asynchronous if is_async else plain)
        consume("good", "bad")
        sentry_sdk.flush()
    finally:
        sentry_sdk.init()
    [event] = events
    assert event["tags"] == {"outbox.group": "page", "outbox.topic": "orders"}
    assert event["contexts"]["outbox"]["attempt"] == 1 and event["contexts"]["outbox"]["message_id"]
    assert event["exception"]["values"][-1]["type"] == "PermanentError"


def test_structlog_has_the_ids_of_the_message(shop: Callable[[str], Any], outbox_settings: Callable[..., None]) -> None:
    outbox_settings(HANDLER_MIDDLEWARE=["shop.logs.bound"])
    shop("logs")
    kept = structlog.testing.LogCapture()
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, kept])
    try:

        @subscriber("orders", group="page")
        def handle(given: Delivery) -> None:
            structlog.get_logger().info("paid", key=given.key)

        consume("1")
        structlog.get_logger().info("later")
    finally:
        structlog.reset_defaults()
    [paid, later] = kept.entries
    assert (paid["key"], paid["topic"], paid["group"]) == ("1", "orders", "page") and paid["message_id"]
    assert set(later) == {"event", "log_level"}


def test_the_receiver_hears_of_a_dead_letter(shop: Callable[[str], Any], caplog: pytest.LogCaptureFixture) -> None:
    shop("receivers")

    @subscriber("orders", group="page")
    def handle(given: Delivery) -> None:
        raise PermanentError("no account")

    consume("1")
    assert sending.flush(10)
    [said] = [one.getMessage() for one in caplog.records if one.name == "shop.receivers"]
    assert said == "ticket: page gave 1 of orders up: PermanentError: no account"
