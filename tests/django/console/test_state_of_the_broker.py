"""Every page says whether a process leads, and no page looks healthy while the figures are old."""

from __future__ import annotations

import re
from uuid import UUID, uuid4

import pytest
from django.test import Client
from django.urls import reverse

from outbox.broker.groups.registration import register
from outbox.broker.operations import summary
from outbox.broker.operations.summary import LeadingProcess
from outbox.contrib.console.rendering import MENU
from outbox.contrib.limits import Limits
from outbox.subscription import Subscription
from tests.django.broker_world import World
from tests.django.console.test_remedies import page, text_of
from tests.django.faults import no_sequencer
from tests.django.operators import working

pytestmark = pytest.mark.usefixtures("no_subscribers", "one_session")

LEADER = UUID(int=5)


def lead(world: World) -> None:
    world.sql("UPDATE outbox.leader_lease SET owner = %s, expires_at = now() + interval '1 hour'", LEADER)


def counted(world: World, owner: UUID, counts: int) -> None:
    summary.refresh(world.run, LeadingProcess(str(owner), "web-1", 4711, "0.2", counts))


def test_every_page_says_that_no_process_leads(world: World, operator: Client) -> None:
    world.subscribe("mail")
    names = [name for pages in MENU.values() for name, _ in pages]
    addresses = [reverse(f"outbox:{name}").removeprefix("/outbox/") for name in names if name != "overview"]
    addresses += ["groups/one/?name=mail", "topics/one/?name=orders", "waiting/"]
    for address in addresses:
        assert "No process has led" not in page(operator, address)
    no_sequencer(world)
    for address in addresses:
        html = page(operator, address)
        assert html.index("No process has led") < html.index("<h1"), address
        assert "manage.py outbox_worker" in html
    part = operator.get("/outbox/groups/", headers={"Outbox-Part": "true"}).content.decode()
    assert "No process has led" in part, "it appears without a reload"
    assert 'class="count"' not in page(operator, "undecided/").partition("</nav>\n<details")[0].rpartition("<nav")[2]
    assert "no_sequencer" in page(operator) and "No process has led" not in page(operator), "the card says it"
    assert "no leader" in text_of(page(operator, "workers/"))


def test_the_workers_page_names_the_leader(world: World, operator: Client) -> None:
    lead(world)
    assert "A process leads the broker" in page(operator, "workers/")
    counted(world, LEADER, 1)
    assert "Process 4711 on web-1, version 0.2, leads the broker." in page(operator, "workers/")
    world.sql("""UPDATE outbox.summary SET facts = jsonb_set(facts, '{leader,later}', '1')""")
    assert "Process 4711 on web-1" in page(operator, "workers/") and "process 4711 on web-1" in page(operator)
    counted(world, uuid4(), 9)
    assert "4711" not in page(operator, "workers/"), "of a former leader"


def test_nothing_is_in_order_before_the_present_leader_has_counted(world: World, operator: Client) -> None:
    """The figures of the first count may lack the messages that waited for a leader."""
    in_order, beginning = "No fault at", "A process has just begun to lead"
    counted(world, uuid4(), 9)
    lead(world)
    html = page(operator)
    assert in_order not in html and beginning in html and 'class="verdict unknown"' in html
    assert "before the present leader" in html
    counted(world, LEADER, 1)
    assert in_order not in page(operator)
    counted(world, LEADER, 2)
    html = page(operator)
    assert in_order in html and beginning not in html and "process 4711 on web-1" in html


def test_the_list_of_groups_says_why_a_group_waits(world: World, operator: Client) -> None:
    world.subscribe("free")
    register(world.run, Subscription(topic="orders", group="limited", options=[Limits(running=2)]))
    for group in ("free", "limited"):
        working(world, group, UUID(int=1))
    world.sql(
        "INSERT INTO outbox.slot_demand"
        " SELECT group_id, topic_id, gen_random_uuid(), 5, 2, 3, 'running', now(), '{}', now() + interval '1 minute'"
        " FROM outbox.subscription_limit"
    )
    html, limited = page(operator, "groups/"), page(operator, "groups/?state=limited")
    rows = re.findall(r'<tr data-key="(\w+)">.*?data-label="State">(.*?)</td>', html, re.DOTALL)
    assert {name: text_of(state) for name, state in rows} == {
        "free": "running",
        "limited": "waits for its running limit",
    }
    assert re.findall(r'<tr data-key="(\w+)">', limited) == ["limited"]


def test_a_zero_has_no_colour(world: World, operator: Client) -> None:
    """A paused group without a message that waits. The control is the same group with one."""
    world.subscribe("mail")
    world.sql("UPDATE outbox.consumer_group SET paused = true")

    def lag() -> str:
        return page(operator, "").partition('<ul class="tiles">')[2].partition("<li")[2][:20]

    assert 'class="ok"' in lag()
    world.publish(1)
    assert 'class="warning"' in lag()
