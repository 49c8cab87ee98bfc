"""Nothing looks healthy over a process, a leader or a database that gives no sign of life."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.test import Client
from django.utils import timezone

from outbox.broker import embedded
from outbox.broker.operations import summary
from outbox.broker.transaction.turns import CHECK_BACK, take_turn
from outbox.contrib.django.database.aliases import alias_conninfo
from tests.django.broker_world import NOWHERE, World
from tests.django.conftest import point_alias
from tests.django.console.test_remedies import page, text_of
from tests.django.console.web_process import kill_server, web_process
from tests.django.faults import no_sequencer
from tests.django.operators import ALL, bury, make_user, working
from tests.django.processes import process
from tests.django.test_worker import _children
from tests.sample.browser import Browser

pytestmark = pytest.mark.usefixtures("no_subscribers")

GREEN = "document.querySelector('.verdict.ok') !== null && !document.querySelector('#live').matches('.stale')"


def verdict(client: Client) -> tuple[str, str]:
    """The colour and the text of the first line of the overview."""
    found = re.search(r'<p class="verdict (\w+)">(.*?)</p>', page(client), re.DOTALL)
    assert found is not None
    return found[1], text_of(found[2])


def quiet_since(world: World, instance: UUID, seconds: float) -> None:
    """The last sign of life of this process is as old as this; a process of `working` gives one every 200 s."""
    past = f"make_interval(secs => {seconds})"
    world.sql(f"UPDATE outbox.consumer SET expires_at = expires_at - {past} WHERE instance_id = %s", instance)
    world.sql(f"UPDATE outbox.consumer_process SET seen_at = seen_at - {past} WHERE instance_id = %s", instance)


def test_a_silent_process_ends_the_green_until_it_is_replaced(world: World, operator: Client) -> None:
    world.subscribe("mail")
    first, second = (working(world, "mail", UUID(int=number)) for number in (1, 2))
    world.sql("UPDATE outbox.consumer SET joined_at = joined_at - interval '1 day'")
    assert verdict(operator)[0] == "ok"
    quiet_since(world, first, 290)
    assert verdict(operator)[0] == "ok", "one renewal may be late by half an interval"
    quiet_since(world, first, 20)
    colour, said = verdict(operator)
    assert colour == "unknown" and re.fullmatch(
        r"No sign of life from process \d+ on \S+ \(for 5 min; one is due every 3 min\)", said
    ), said
    assert "alive, but silent" in text_of(page(operator, "workers/"))
    assert 'class="badge good">not paused' not in page(operator, "groups/one/?name=mail")
    assert '<li class="unknown"><a href="/outbox/workers/">' in page(operator)
    # It has vanished, and so has the other one; one process has joined since.
    for instance in (first, second):
        quiet_since(world, instance, 900)
    third = working(world, "mail", UUID(int=3))
    colour, said = verdict(operator)
    assert colour == "unknown" and said.count("process ") == 1, "one of the two is replaced"
    working(world, "mail", UUID(int=4))
    colour, said = verdict(operator)
    assert (colour, said[:11]) == ("ok", "No fault at")
    quiet_since(world, third, 400)
    assert verdict(operator)[0] == "unknown", "the control: a replacement is a process like any other"


def test_check_back_that_does_not_run_ends_the_green(world: World, operator: Client) -> None:
    assert take_turn(world.run, "shop", CHECK_BACK, interval_seconds=30)
    world.sql("UPDATE outbox.periodic_pass SET began_at = now() - interval '40 s'")
    assert verdict(operator)[0] == "ok"
    world.sql("UPDATE outbox.periodic_pass SET began_at = now() - interval '70 s'")
    colour, said = verdict(operator)
    assert colour == "unknown"
    assert re.fullmatch(r"No sign of life from check-back of shop \(for 7\d s; one is due every 30 s\)", said), said
    # Beside a condition, too: it may be the cause.
    world.subscribe("mail")
    world.publish()
    bury(world, "mail", "k0", "ValueError: no")
    colour, said = verdict(operator)
    assert colour in ("warning", "critical") and "No sign of life from check-back of shop" in said


def test_green_names_the_time_of_its_figures_and_ends_when_they_are_old(world: World, operator: Client) -> None:
    summary.refresh(world.run)
    # A leader whose counts take long counts more rarely.
    world.sql("UPDATE outbox.summary SET took_seconds = 0.01")
    world.sql("UPDATE outbox.tick SET at = now() - interval '6 minutes'")
    html = page(operator)
    [(at,)] = world.sql("SELECT at FROM outbox.summary")
    counted = f"{timezone.localtime(at):%H:%M:%S}"
    colour, said = verdict(operator)
    idle = r"idle: no new message for 6 min; the leader looked \d+ s ago"
    assert colour == "ok" and re.fullmatch(f"No fault at {counted} {idle}", said), said
    assert f"counted at {counted} , every 5.0 s" in text_of(html) and "every 1.0 s" in text_of(html)
    world.sql("UPDATE outbox.summary SET at = now() - interval '20 s'")
    colour, said = verdict(operator)
    assert colour == "unknown"
    assert re.fullmatch(r"The figures are old \(\d+ s; the leader counts them every 5 s\)", said), said


def test_what_an_open_page_asks_differs_when_something_changed(world: World, operator: Client) -> None:
    world.subscribe("mail")
    states: list[str] = []

    def has_changed() -> bool:
        answer: dict[str, Any] = operator.get("/outbox/liveness/").json()
        states.append(answer["state"])
        assert re.fullmatch(r"\d\d:\d\d:\d\d", answer["at"])
        return len(states) == 1 or states[-2] != states[-1]

    has_changed()
    assert f'data-state="{states[0]}"' in page(operator)
    assert not has_changed()
    instance = working(world, "mail", UUID(int=1))
    assert has_changed() and not has_changed()
    quiet_since(world, instance, 400)
    assert has_changed() and not has_changed()
    summary.refresh(world.run)
    assert has_changed() and not has_changed()
    no_sequencer(world)
    assert has_changed() and not has_changed()
    broker = alias_conninfo("broker")
    point_alias("broker", NOWHERE)
    try:
        assert has_changed()
        assert verdict(operator)[0] == "critical"
    finally:
        point_alias("broker", broker)


@pytest.mark.slow
@pytest.mark.browser
def test_an_open_page_is_not_green_over_a_killed_worker(world: World) -> None:
    """The worker is killed with all of its processes. Without a change, the page would refresh after ten minutes."""
    world.sql("DELETE FROM outbox.leader_lease")
    with (
        web_process(make_user(*ALL), refresh_seconds=600) as web,
        process(("-m", "django", "outbox_worker"), quiet=True) as running,
        Browser() as browser,
    ):
        web.site.open(browser)
        browser.wait_for(GREEN)
        before = browser.text(".verdict")
        for pid in [running.pid, *descendants(running.pid)]:
            os.kill(pid, signal.SIGKILL)
        browser.wait_for(f"!({GREEN})")
        assert before.startswith("No fault at") and "No fault" not in browser.text(".verdict")
        browser.wait_for("document.querySelector('.verdict.critical, .verdict.warning') !== null")
        assert "no_sequencer" in browser.text("#live")


@pytest.mark.browser
@pytest.mark.slow
def test_an_open_page_is_not_green_over_a_killed_database(own_server: Path) -> None:
    with web_process(make_user(*ALL), refresh_seconds=600) as web, Browser() as browser:
        web.site.open(browser)
        browser.wait_for(GREEN)
        kill_server(embedded.postmaster_pid(own_server), alias_conninfo("broker"))
        browser.wait_for(f"!({GREEN})")
        embedded.start(own_server)
        browser.wait_for(GREEN)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have started."""
    return [one for child in _children(pid) for one in (child, *descendants(child))]
