"""The pages of events: versions, fields, publishers, readers, and when each version was seen last."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import pytest
from django.test import Client, modify_settings
from django.utils import timezone

from outbox import Delivery, event, upcast
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.operations.event_catalogue import seen_events
from outbox.events import declaration
from tests.django.broker_world import World
from tests.django.support import sequence

pytestmark = pytest.mark.usefixtures("no_subscribers", "one_session")


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    with declaration.restored():
        declaration.forget()
        yield


def table(page: str) -> list[list[str]]:
    """The texts of the cells of all rows of the page's tables."""
    rows = re.findall(r"<tr data-key=.*?</tr>", page, re.DOTALL)
    cells = [re.findall(r"<t[hd][ >].*?</t[hd]>", row, re.DOTALL) for row in rows]
    return [[" ".join(unescape(re.sub(r"<[^>]*>", " ", cell)).split()) for cell in row] for row in cells]


@dataclass(frozen=True)
class Paid:
    number: int
    email: str
    currency: str = "EUR"


@dataclass(frozen=True)
class Refused:
    reason: str


@dataclass(frozen=True)
class Parcel:
    order: int


@pytest.fixture
def orders(declared: None) -> None:
    event("order.paid", version=2, topic="orders", key="number")(Paid)
    event("payment.refused", topic="payments", publisher="billing")(Refused)
    upcast("order.paid", 1)(lambda body: {**body, "email": ""})


def test_a_project_without_events_reads_how_to_begin(world: World, operator: Client) -> None:
    page = unescape(operator.get("/outbox/events/").content.decode())
    assert "This project declares no typed events" in page and '@event("order.paid")' in page
    assert '<a href="/outbox/events/" aria-current="page">Events</a>' in page


def test_the_list_names_versions_publishers_groups_and_the_newest_message(
    world: World, operator: Client, orders: None
) -> None:
    @subscriber("orders", group="mail")
    def handle(delivery: Delivery[Paid]) -> None:
        pass

    world.subscribe("mail")
    world.subscribe("books")
    publish(Paid(1, "a@example.org"), at_once=True)
    publish("orders", {"number": 2}, at_once=True)
    newest = publish(
        "orders", {"number": 3}, headers={"outbox-event": "order.paid", "outbox-event-version": "3"}, at_once=True
    )
    publish("payments", {}, headers={"outbox-event": "refund.sent", "outbox-event-version": "one"}, at_once=True)
    world.half()
    sequence()
    page = operator.get("/outbox/events/").content.decode()
    [(stored,)] = world.sql("SELECT stored_at FROM outbox.commit_log WHERE message_id = %s", newest.message_id)
    at = f"{timezone.localtime(stored):%Y-%m-%d %H:%M:%S}"
    [paid, refused, sent] = table(page)
    assert paid == ["order.paid", "orders", "3 unknown 2 1", "shop", "mail , books", f"{at} version 3"]
    assert refused == ["payment.refused", "payments", "1", "billing", "none", "–"]
    assert sent[:5] == ["refund.sent", "payments", "not a number, unknown", "–", "none"]
    assert f'href="/outbox/messages/{newest.message_id}/"' in page
    for query, names in (
        ("?state=seen", ["order.paid", "refund.sent"]),
        ("?state=unseen", ["payment.refused"]),
        ("?state=unknown", ["order.paid", "refund.sent"]),
        ("?q=pay", ["payment.refused"]),
    ):
        assert [row[0] for row in table(operator.get(f"/outbox/events/{query}").content.decode())] == names


def test_the_page_of_an_event_has_handlers_fields_and_a_masked_example(
    world: World, operator: Client, orders: None, outbox_settings: Callable[..., None]
) -> None:
    outbox_settings(MASKED_FIELDS={"orders": ["email", "currency"]})
    event("parcel.ordered", topic="orders")(Parcel)
    upcast("order.paid", 2, to=("parcel.ordered", 1))(lambda body: {"order": body["number"]})

    @subscriber("orders", group="mail")
    def mail(delivery: Delivery[Paid]) -> None:
        pass

    @subscriber("orders", group="parcels")
    def pack(delivery: Delivery[Parcel]) -> None:
        pass

    @subscriber("orders", group="audit")
    def note(delivery: Delivery) -> None:
        pass

    world.subscribe("elsewhere")
    publish(Paid(1, "a@example.org"), at_once=True)
    sequence()
    page = operator.get("/outbox/events/one/", {"name": "order.paid"}).content.decode()
    rows = table(page)
    here = "tests.django.console.test_events_page"
    of_type = f"{here}.Paid"
    test = f"{here}:test_the_page_of_an_event_has_handlers_fields_and_a_masked_example.<locals>"
    assert [row[:3] + row[4:] for row in rows[:2]] == [
        ["2", "published", of_type, "1"],
        ["1", "converted by @upcast", "–", "0"],
    ]
    assert rows[2:6] == [
        ["audit", f"{test}.note", "the stored version, as JSON"],
        ["mail", f"{test}.mail", "version 2"],
        ["parcels", f"{test}.pack", "parcel.ordered version 1, by @upcast"],
        ["elsewhere", "–", "not known: its handler is in other code"],
    ]
    assert rows[6:] == [
        ["number", "integer", "yes"],
        ["email", "string", "yes"],
        ["currency", "string", "no"],
    ]
    [example] = re.findall(r"<pre tabindex=\"0\">(.*?)</pre>", page, re.DOTALL)
    assert unescape(example) == '{\n  "number": 1,\n  "email": "***",\n  "currency": "***"\n}'
    assert "a@example.org" not in page
    assert operator.get("/outbox/events/one/", {"name": "nobody"}).status_code == 404


def test_the_look_at_the_log_reads_no_more_than_the_newest_rows(world: World) -> None:
    for number in range(8):
        publish("orders", {}, headers={"outbox-event": "old" if number < 5 else "new"}, at_once=True)
    found = [(one.event, one.messages) for one in seen_events(world.run, newest=3)]
    assert found == [("new", 3)]


def test_an_app_whose_events_cannot_be_imported_is_named(
    world: World, operator: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = tmp_path / "app_with_wrong_events"
    app.mkdir()
    (app / "__init__.py").touch()
    (app / "events.py").write_text("from outbox import nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with modify_settings(INSTALLED_APPS={"append": app.name}):
        found = operator.get("/outbox/events/")
    page = unescape(found.content.decode())
    assert found.status_code == 500
    assert "The events of this project cannot be imported" in page
    assert "the events in app_with_wrong_events.events cannot be imported: ImportError" in page
