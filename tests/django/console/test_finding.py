"""Finding things on the pages: every condition, and messages by id, key, topic and time."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from outbox.broker.operations.conditions import CATALOGUE
from outbox.contrib.django import publish
from outbox.contrib.django.console.rendering import PER_PAGE
from tests.django import faults, faults_of_groups
from tests.django.broker_world import FAULTS, World
from tests.django.support import sequence

pytestmark = pytest.mark.usefixtures("no_subscribers")


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_fault_is_on_the_page_with_meaning_and_next_step(world: World, operator: Client, name: str) -> None:
    assert faults and faults_of_groups
    FAULTS[name](world)
    page = operator.get("/outbox/").content.decode()
    shown = page.replace("&#x27;", "'").replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">")
    assert f"</span> {name}" in shown
    assert CATALOGUE[name].meaning in shown
    assert CATALOGUE[name].next_step.replace("`", "") in re.sub("</?code>", "", shown)


def test_messages_are_found_by_id_key_topic_and_time(world: World, operator: Client) -> None:
    receipt = publish("orders", {}, key="order-7")
    publish("payments", {}, key="order-7")
    publish("payments", {}, key="order-8")
    sequence()

    def found(**given: str) -> int:
        page = operator.get("/outbox/messages/", given).content.decode()
        return page.count('class="id" href')

    by_id = operator.get("/outbox/messages/", {"q": f" {receipt.message_id} "})
    assert by_id["Location"] == f"/outbox/messages/{receipt.message_id}/"
    assert found() == 3
    assert found(q="order-7") == 2
    assert found(q="order-7", topic="payments") == 1
    assert found(topic="payments") == 2
    assert found(q="order-9") == 0
    hour_ago = timezone.now() - timedelta(hours=1)
    assert found(until=hour_ago.isoformat(), within="day") == 0
    assert found(since=hour_ago.isoformat()) == 3
    world.age(2 * 3600)
    assert found(q="order-7") == 0 and found(q="order-7", within="day") == 2


def test_what_cannot_be_meant_is_said(operator: Client) -> None:
    for given in ({"since": "yesterday"}, {"after": "-1"}, {"q": "\0"}, {"since": "0001-01-01T00:00"}):
        assert operator.get("/outbox/messages/", given).status_code in (200, 400)
    assert b"is no time" in operator.get("/outbox/messages/", {"since": "yesterday"}).content
    assert operator.get("/outbox/undecided/", {"after": "x"}).status_code == 400
    for page in ("groups", "topics"):
        assert operator.get(f"/outbox/{page}/one/", {"name": "nobody"}).status_code == 404


def test_every_list_has_its_pages(world: World, operator: Client) -> None:
    for number in range(PER_PAGE + 5):
        publish("orders", {}, key=f"k{number}")
    sequence()
    address, shown = "/outbox/messages/?topic=orders", []
    while address:
        page = operator.get(address).content.decode()
        shown.append(page.count('class="id" href'))
        more = page.partition('rel="next"')[0].rpartition('href="')[2].partition('"')[0]
        address = "/outbox/messages/" + more.replace("&amp;", "&") if 'rel="next"' in page else ""
    assert shown == [PER_PAGE, 5]
