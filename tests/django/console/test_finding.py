"""Finding things on the pages: messages by id, key, topic and time."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.test import Client
from django.utils import timezone

from outbox.broker.operations import summary
from outbox.contrib.console.rendering import PER_PAGE
from outbox.contrib.console.views.dead_letters import COUNTED
from outbox.contrib.django import publish
from outbox.contrib.django.engine.broker import flush
from outbox.contrib.reconciliation.models import Finding
from tests.django.broker_world import World
from tests.django.support import sequence

pytestmark = pytest.mark.usefixtures("no_subscribers", "one_session")


def test_messages_are_found_by_id_key_topic_and_time(world: World, operator: Client) -> None:
    receipt = publish("orders", {}, key="order-7", at_once=True)
    publish("payments", {}, key="order-7", at_once=True)
    publish("payments", {}, key="order-8", at_once=True)
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


def test_unknown_groups_and_topics_are_not_found(operator: Client) -> None:
    for page in ("groups", "topics"):
        answer = operator.get(f"/outbox/{page}/one/", {"name": "nobody"})
        assert answer.status_code == 404 and b"To the overview" in answer.content


def test_every_list_has_its_pages(world: World, operator: Client) -> None:
    for number in range(PER_PAGE + 5):
        publish("orders", {}, key=f"k{number}", at_once=True)
    sequence()
    address, shown = "/outbox/messages/?topic=orders", []
    while address:
        page = operator.get(address).content.decode()
        shown.append(page.count('class="id" href'))
        more = page.partition('rel="next"')[0].rpartition('href="')[2].partition('"')[0]
        address = "/outbox/messages/" + more.replace("&amp;", "&") if 'rel="next"' in page else ""
    assert shown == [PER_PAGE, 5]
    assert '<a href="?topic=orders">Back to the first page</a>' in page


def test_letters_of_one_message_are_on_the_same_page(world: World, operator: Client) -> None:
    """One letter of the oldest message, then PER_PAGE of which the last two belong to two groups: three pages."""
    world.subscribe("one")
    world.subscribe("other")
    world.publish(PER_PAGE + 1)
    world.sql(
        "INSERT INTO outbox.dead_letter (group_id, log_id, attempts, error, dead_at)"
        " SELECT group_id, log_id, 1, 'x', now() - make_interval(mins => rank::int)"
        " FROM (SELECT log_id, rank() OVER (ORDER BY log_id) FROM outbox.commit_log) AS message, outbox.consumer_group"
        " WHERE name = 'one' OR rank = %s",
        PER_PAGE,
    )
    address, shown = "/outbox/dead-letters/list/", []
    while address:
        answer = operator.get(address)
        page = answer.context["page"]
        shown.append(len(page.rows))
        address = f"/outbox/dead-letters/list/?{page.more}" if page.more else ""
    assert shown == [PER_PAGE - 1, 3]


def many_dead_letters(world: World, group: str, count: int, error: str, minutes_ago: int) -> None:
    """Dead letters that stand on the page by their error, without messages."""
    world.sql(
        "INSERT INTO outbox.dead_letter (group_id, log_id, attempts, error, dead_at)"
        " SELECT group_id, -number, 1, %s, now() - make_interval(mins => %s)"
        " FROM outbox.consumer_group, generate_series(1, %s) AS number WHERE name = %s",
        error, minutes_ago, count, group,
    )  # fmt: skip


def test_many_dead_letters_of_one_group_hide_none_of_another(world: World, operator: Client) -> None:
    for group in ("flood", "mail"):
        world.subscribe(group)
    many_dead_letters(world, "flood", COUNTED + 5, "ValueError: one of many", 1)
    many_dead_letters(world, "mail", 3, "TimeoutError: no answer", 60)
    for query in ("", "?group=mail"):
        page = operator.get(f"/outbox/dead-letters/{query}").content.decode()
        assert "TimeoutError" in page and "mail" in page and ">3 " in page, query
    assert "only the newest" not in operator.get("/outbox/dead-letters/?group=mail").content.decode()
    flood = operator.get("/outbox/dead-letters/?group=flood").content.decode()
    assert "Of flood only the newest 10\u202f000 are counted here" in flood


def test_a_flood_of_incidents_hides_no_other_condition(world: World, operator: Client) -> None:
    insert = (
        "INSERT INTO outbox.incident (kind, subject, detail, at) SELECT %s, %s, 'x', now() - make_interval(secs => %s)"
    )
    world.sql(insert, "contradicted", str(uuid4()), 300)
    for seconds in (100, 90, 80):
        world.sql(insert, "process_died", "consumer-1", seconds)
    world.sql(f"{insert} FROM generate_series(1, 1200)", "refused", "other", 10)
    page = operator.get("/outbox/").content.decode()
    for name in ("refused", "contradicted", "crash_loop"):
        assert f"</span> {name}" in page, name
    assert ">contradicted</td>" in operator.get("/outbox/incidents/?kind=contradicted").content.decode()
    assert 'rel="next"' in operator.get("/outbox/incidents/").content.decode()


def test_many_crashing_handlers_hide_no_hanging_one(world: World, operator: Client) -> None:
    world.subscribe("mail")
    world.sql(
        "INSERT INTO outbox.quarantined_message (group_id, log_id, call_size, deaths, hung, evidence)"
        " SELECT group_id, number, 1, 1 - (number / 121), number = 121, 'seen'"
        " FROM outbox.consumer_group, generate_series(1, 121) AS number WHERE name = 'mail'"
    )
    page = operator.get("/outbox/").content.decode()
    assert "</span> hung_handlers" in page and "</span> quarantined" in page and "× 120" in page


def test_findings_that_were_cut_say_so(world: World, operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.contrib.reconciliation.actions.MAX_SAVED", 2)
    given = {"output": "results", "run": "r", "rule": "orders", "severity": "critical", "finding_class": "LATE"}
    Finding.objects.create(**given, key="7")
    assert "only the first" not in operator.get("/outbox/findings/").content.decode()
    Finding.objects.create(**given, key="8")
    assert "only the first 2 findings" in operator.get("/outbox/findings/?class=LOST").content.decode()


def test_the_publishing_rate_is_not_the_sequencers(world: World, operator: Client) -> None:
    summary.refresh(world.run)
    for number in range(40):
        publish("orders", {}, key=f"k{number}", at_once=True)
    flush(within_seconds=5)
    summary.refresh(world.run)
    history = operator.get("/outbox/history/").json()
    assert history["published"][-1] > 0 and history["queued"][-1] == 0
    sequence()
    summary.refresh(world.run)
    history = operator.get("/outbox/history/").json()
    assert history["published"][-1] == 0 and history["queued"][-1] > 0
    page = operator.get("/outbox/").content.decode()
    assert 'data-series="published queued' in page and "Published|Queued by the sequencer|" in page
