"""A declared listing is a command's table, its JSON and a page: each has all of its columns, and the same rows."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from html import unescape
from typing import Any

import pytest
from django.test import Client
from django.utils.html import strip_tags

from outbox.contrib.django.actions import cells
from outbox.contrib.django.actions.listing import COMMAND, PAGE, Listing
from outbox.contrib.django.catalogue import LISTINGS
from tests.django.broker_world import World
from tests.django.operators import bury, command_of, working
from tests.django.support import call

pytestmark = pytest.mark.usefixtures("no_subscribers")


def printed(listing: Listing, *more: str) -> str:
    return call(*command_of(listing, "mail"), *more)


def cells_of(page: str, label: str) -> list[str]:
    """The texts of a column of a page's table."""
    found = re.findall(rf'<td data-label="{label}"[^>]*>(.*?)</td>', page, re.DOTALL)
    return [unescape(strip_tags(one)) for one in found]


# Other tests read these listings of parts with rows.
WITHOUT_ROWS = {"findings", "relay", "edited", "schedules"}


def test_each_listing_has_its_columns_in_the_command_and_on_the_page(world: World, operator: Client) -> None:
    world.subscribe("mail")
    world.publish(2)
    bury(world, "mail", "k0", "ValueError: no\nsecond line")
    world.half()
    working(world, "mail", world.sql("SELECT message_id FROM outbox.commit_log LIMIT 1")[0][0])
    seen = []
    for listing in LISTINGS.values():
        if not listing.command:
            continue
        rows: list[Any] = json.loads(printed(listing, "--json"))
        table = printed(listing).splitlines()
        if rows:
            seen.append(listing.name)
            labels = [one.label.lower() for one in listing.on(COMMAND, {})]
            assert re.split(r"  +", table[0]) == labels and len(table) == 1 + len(rows), listing.name
        else:
            assert table == ["none"], listing.name
        if listing.address and listing.template != "findings":
            page = operator.get(f"/outbox/{listing.address}").content.decode()
            assert page.count("<tbody>") == bool(rows), listing.name
            for one in listing.on(PAGE, {"group": None}) if rows else ():
                assert one.style == "head" or len(cells_of(page, one.label)) == len(rows), one.label
    # A listing without rows is not checked: add rows of a new one above.
    assert {one.name for one in LISTINGS.values() if one.command} - set(seen) <= WITHOUT_ROWS


def test_a_cell_is_html_for_a_page_and_text_for_a_command(settings: Any) -> None:
    settings.TIME_ZONE = "Europe/Berlin"
    at = datetime(2026, 1, 31, 8, tzinfo=UTC)
    name = "a<b>\x1b[2J"
    for value, html, text in (
        (None, "–", "-"),
        (0, "0", "0"),
        (1234567, "1\u202f234\u202f567", "1234567"),
        ([cells.badge("failing", "bad"), None, "x"], '<span class="badge bad">failing</span> x', "failing x"),
        (name, "a&lt;b&gt;\\x1b[2J", name),
        (cells.quiet(name), '<span class="quiet">a&lt;b&gt;\\x1b[2J</span>', "a<b>\\x1b[2J"),
        (cells.joined([], nothing="none"), "none", "none"),
        (cells.joined(["a", 2]), "a, 2", "a, 2"),
    ):
        assert (cells.html(value), cells.plain(value)) == (html, text), value
    assert "2026-01-31 09:00:00</time>" in str(cells.html(at))
    assert cells.plain(at) == "2026-01-31 08:00:00+00:00"
    assert cells.plain(cells.ago(at)) == "2026-01-31 09:00:00+01:00", "a command prints the exact time"
    shown = str(cells.group_link(name))
    assert shown.startswith('<a href="/outbox/groups/one/?name=a%3Cb%3E%1B%5B2J">') and "<b>" not in shown
