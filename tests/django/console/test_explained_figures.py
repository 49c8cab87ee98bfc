"""A figure that looks bad and is not says why: a lag by the group's own limit, an idle broker, a changed topic."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.test import Client

from outbox.broker.groups.registration import register
from outbox.contrib.console.cards import cards
from outbox.contrib.django.operations.installation import install_broker
from outbox.contrib.django.operations.watching import look
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.limits import Limits
from outbox.subscription import Subscription
from tests.django.broker_world import World
from tests.django.configured import OUTBOX
from tests.django.console.test_remedies import page, text_of

pytestmark = pytest.mark.usefixtures("no_subscribers", "one_session")


def test_the_lag_of_a_group_that_waits_for_its_own_limit_names_the_limit(world: World, operator: Client) -> None:
    register(world.run, Subscription(topic="orders", group="mail", options=[Limits(running=2)]))
    world.subscribe("stock")
    world.publish(3)
    world.age(120)
    world.sql(
        "INSERT INTO outbox.slot_demand"
        " SELECT group_id, topic_id, %s, 5, 2, 3, 'running', now() - interval '2 minutes', '{}',"
        " now() + interval '1 minute' FROM outbox.subscription_limit",
        uuid4(),
    )
    [lag] = [one for one in look().verdict.conditions if one.name == "lag"]
    limits = {fact["group"]: (fact.get("waiting_for"), fact.get("limits")) for fact in lag.evidence}
    assert limits == {"mail": ("running limit", "running=2, burst=1"), "stock": (None, None)}
    assert "the group waits for this limit: raise it" in lag.next_step
    assert "add consumers, or fix the slow or blocked handler" in text_of(page(operator)), "the other group is behind"
    [card] = cards([lag], group="mail")
    assert [(one.link, one.url) for one in card.evidence] == [
        ("Change the limits …", "/outbox/groups/one/?name=mail&topic=orders#limits")
    ]
    assert "waiting for running limit" in text_of(page(operator, "groups/one/?name=mail"))


def test_an_installation_says_what_it_changes_of_a_topic(world: World, outbox_settings: Callable[..., None]) -> None:
    topics = {**OUTBOX["TOPICS"], "orders": {"queue_count": 8, "types": ["FIFO", "TRANSACTION"]}}
    outbox_settings(TOPICS=topics)
    said = "topic 'orders' is changed: types from NORMAL, TRANSACTION to FIFO, TRANSACTION; queue_count from 4 to 8."
    out = StringIO()
    call_command("migrate", database="broker", stdout=out, verbosity=1)
    assert said in out.getvalue()
    lines: list[str] = []
    install_broker(get_settings(), report=lines.append)
    assert lines == [], "it is as declared"
    outbox_settings(TOPICS=OUTBOX["TOPICS"])
    out = StringIO()
    call_command("outbox_install", stdout=out)
    assert "topic 'orders' is changed: types from FIFO, TRANSACTION to NORMAL, TRANSACTION;" in out.getvalue()
