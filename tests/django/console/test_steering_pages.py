"""Dead letters, waiting messages, and groups: each action has the effect of its command, and shows its plan first."""

from __future__ import annotations

import re

import pytest
from django.test import Client

from outbox.broker.groups.registration import register
from outbox.contrib.django import publish
from outbox.contrib.django.models import OperatorAction
from outbox.contrib.limits import Limits
from outbox.contrib.reconciliation.models import Finding
from outbox.subscription import Subscription
from tests.django.broker_world import World
from tests.django.operators import bury, dead_keys
from tests.django.support import sequence

pytestmark = pytest.mark.usefixtures("no_subscribers", "one_session")


def shown(client: Client, name: str, **given: object) -> str:
    answer = client.post(f"/outbox/act/{name}/", given)
    assert answer.status_code == 200, answer.content
    return answer.content.decode()


def done(client: Client, name: str, **given: object) -> OperatorAction:
    """Confirm, as the page that was shown does."""
    answer = client.post(f"/outbox/act/{name}/", {**given, "confirmed": "yes", "why": "a test"})
    assert answer.status_code == 302, answer.content
    return OperatorAction.objects.latest("id")


def letters(world: World, count: int = 3) -> None:
    world.subscribe("mail")
    world.publish(count)
    for number in range(count):
        bury(world, "mail", f"k{number}", "TimeoutError: no answer")


def test_chosen_dead_letters_are_replayed_or_discarded(world: World, operator: Client) -> None:
    letters(world)
    page = operator.get("/outbox/dead-letters/list/?group=mail").content.decode()
    assert page.count('type="checkbox" name="ids"') == 3
    chosen = [str(one) for (one,) in world.sql("SELECT message_id FROM outbox.commit_log WHERE key IN ('k0', 'k1')")]
    assert "Discard 2 dead letters of group mail" in shown(operator, "discard", group="mail", ids=chosen)
    assert dead_keys(world.run, "mail") == ["k0", "k1", "k2"], "nothing before it is confirmed"
    assert done(operator, "discard", group="mail", ids=chosen[0]).after == {"settled": 1}
    assert done(operator, "replay", group="mail", ids=chosen[1]).after == {"settled": 1}
    assert dead_keys(world.run, "mail") == ["k2"]
    assert "There is nothing to do" in shown(operator, "replay", group="mail", error_type="KeyError")
    assert operator.post("/outbox/act/replay/", {"group": "mail"}).status_code == 400, "not all by mistake"
    settled = operator.get("/outbox/dead-letters/list/?settled=yes").content.decode()
    assert ">replayed<" in settled and settled.count('class="id" href') == 3


def test_a_delayed_message_is_taken_back(world: World, operator: Client) -> None:
    receipt = publish("reminders", {}, key="later", delay=3600, at_once=True)
    sequence()
    page = operator.get("/outbox/waiting/").content.decode()
    assert "its delivery time" in page and str(receipt.message_id) in page
    assert "Recall 1 message before" in shown(operator, "recall", ids=str(receipt.message_id))
    assert operator.get("/outbox/waiting/").content.decode().count('class="id"') == 1
    entry = done(operator, "recall", ids=str(receipt.message_id))
    assert entry.after == {str(receipt.message_id): "recalled", "messages": 1}
    assert "No messages are waiting" in operator.get("/outbox/waiting/").content.decode()
    assert "recalled" in operator.get(f"/outbox/messages/{receipt.message_id}/").content.decode()


def test_a_group_is_paused_resumed_and_moved(world: World, operator: Client) -> None:
    world.subscribe("mail")
    world.publish(8)
    page = operator.get("/outbox/groups/one/?name=mail").content.decode()
    assert "not paused" in page and "Queues of orders" in page, "its only topic is shown"
    assert done(operator, "pause", group="mail").after == {"paused": True}
    assert "There is nothing to do" in shown(operator, "pause", group="mail")
    assert done(operator, "resume", group="mail").after == {"paused": False, "released_queues": 0}
    moved = {"group": "mail", "topic": "orders"}
    assert 'name="to_time"' in page and 'name="reprocess"' in page and "Reset …" in page, "the form of the declaration"
    plan = shown(operator, "reset", **moved, to_latest="yes")
    assert "The group skips 8 messages that it has not handled" in plan
    ends = done(operator, "reset", **moved, to_latest="yes").after
    assert sum(ends.values()) == 8
    assert "The group gets 8 messages again" in shown(operator, "reset", **moved, to_earliest="yes")
    assert set(done(operator, "reset", **moved, to_earliest="yes").after.values()) == {0}
    assert operator.post("/outbox/act/reset/", {**moved, "to_latest": "yes", "to_earliest": "yes"}).status_code == 400
    assert operator.post("/outbox/act/pause/", {"group": "nobody"}).status_code == 404


def test_the_form_of_limits_shows_what_holds(world: World, operator: Client) -> None:
    register(world.run, Subscription(topic="orders", group="mail", options=[Limits(running=2, rate="100/min")]))
    page = operator.get("/outbox/groups/one/?name=mail&topic=orders").content.decode()
    form = page.partition('<form method="post" action="/outbox/act/limits/"')[2].partition("</form>")[0]
    assert "(now 2)" in form and "(now 100/min)" in form and "(now no limit)" in form and "such as 100/min" in form
    given = dict(re.findall(r'name="(group|topic|back)" value="([^"]*)"', form))
    assert given["group"] == "mail" and given["topic"] == "orders"
    wrong = operator.post("/outbox/act/limits/", {**given, "running": "5", "rate": "fast"})
    assert wrong.status_code == 400 and "give a number above 0 and a unit" in wrong.content.decode()
    plan = operator.post("/outbox/act/limits/", {**given, "running": "5"}).content.decode()
    assert "Limit group mail on topic orders to running=5, rate=100/min" in plan
    assert "<dt>changed</dt><dd>–</dd>" in plan and "{}" not in plan
    assert done(operator, "limits", **given, running="5").after["changed"] == {"running": 5}


def test_publishing_is_refused_and_accepted(world: World, operator: Client) -> None:
    assert done(operator, "reject").after == {"rejecting": True}
    assert "Accept them again" in operator.get("/outbox/").content.decode()
    assert done(operator, "accept").after == {"rejecting": False}
    assert "There is nothing to do" in shown(operator, "accept")


def test_groups_and_topics_are_listed_from_the_summary(world: World, operator: Client) -> None:
    world.subscribe("mail")
    world.publish(8)
    groups = operator.get("/outbox/groups/").content.decode()
    assert ">mail</a>" in groups and "no workers" in groups
    assert ">orders</a>" in operator.get("/outbox/topics/?q=ord").content.decode()
    topic = operator.get("/outbox/topics/one/?name=orders").content.decode()
    assert ">mail</a>" in topic and "NORMAL" in topic
    part = operator.get("/outbox/groups/", headers={"Outbox-Part": "true"}).content.decode()
    assert part.strip().startswith('<div id="live"') and "<html" not in part


def test_findings_say_what_to_do(world: World, operator: Client) -> None:
    receipt = publish("orders", {}, at_once=True)
    given = {"output": "o", "run": "r", "rule": "paid orders", "severity": "critical"}
    Finding.objects.create(**given, finding_class="DEAD", key="7", message_id=str(receipt.message_id), group="mail")
    Finding.objects.create(**given, finding_class="LOST", key="8")
    page = operator.get("/outbox/findings/").content.decode()
    assert "then replay the dead letter" in page and f"/outbox/messages/{receipt.message_id}/" in page
    assert "<code>outbox_repair</code>" in page
    assert "<h3>8</h3>" in page and "<h3>8</h3>" not in operator.get("/outbox/findings/?class=DEAD").content.decode()


def test_a_form_that_was_made_by_hand_is_refused_and_not_an_error(operator: Client) -> None:
    """The form of the page names the group and the topic; this request names nothing, or one of them."""
    for given in ({"running": "5"}, {"group": "mail"}, {"topic": "mail"}):
        answer = operator.post("/outbox/act/limits/", given)
        assert answer.status_code == 400 and b"is missing" in answer.content, given
