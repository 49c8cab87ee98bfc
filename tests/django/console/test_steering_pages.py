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
