"""The page of schedules: the last message, the next due moments, the state and the actions."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import call_command
from django.test import Client

from outbox.contrib.schedules.schedule import Schedule, declare
from tests.django.broker_world import World

pytestmark = pytest.mark.usefixtures("no_subscribers")


def test_the_page_shows_last_and_next_and_links_the_last_message(world: World, operator: Client) -> None:
    at_three = Schedule(
        producer_group="shop", name="report", topic="orders", expression="0 3 * * *", timezone="Europe/Berlin"
    )
    declare(world.run, "shop", [at_three])
    call_command("outbox_schedule", "run", "report", stdout=StringIO())
    [(message_id,)] = world.sql("SELECT message_id FROM outbox.commit_log")
    page = operator.get("/outbox/schedules/").content.decode()
    assert f"/outbox/messages/{message_id}/" in page
    assert page.count("<time ") == 5 and "Run now" in page and ">active<" in page
    call_command("outbox_schedule", "pause", "report", stdout=StringIO())
    page = operator.get("/outbox/schedules/").content.decode()
    assert ">paused<" in page and "Resume" in page
