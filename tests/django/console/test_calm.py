"""The pages are quiet: a menu of a few words, one card per cause, and the reason why nothing moves."""

from __future__ import annotations

import re

from django.test import Client

from outbox.contrib.console.rendering import MENU, menu
from outbox.contrib.django.catalogue import LISTINGS
from outbox.contrib.reconciliation.models import Finding
from tests.django.broker_world import World
from tests.django.console.test_remedies import page


def test_the_menu_has_each_page_once_in_the_section_of_its_purpose(world: World, operator: Client) -> None:
    names = [name for pages in MENU.values() for name, _ in pages]
    assert len(names) == len(set(names)) and {one.name for one in LISTINGS.values() if one.menu} <= set(names)
    assert list(MENU) == ["Now", "Messages", "Groups", "Repair", "History"]
    html = page(operator, "dead-letters/").partition("</header>")[0]
    assert re.findall(r'aria-current="(\w+)">([\w ]+)<', html) == [("true", "Repair"), ("page", "Dead letters")]
    assert re.findall(r'<nav[^>]* aria-label="(\w+)"', html) == ["Operations", "Repair"]


def test_a_page_below_a_list_shows_the_section_of_the_list() -> None:
    for path, section, label in (
        ("groups/one/", "Groups", "Groups"),
        ("messages/00000000-0000-0000-0000-000000000001/", "Messages", "Messages"),
        ("audit/7/", "History", "Audit"),
    ):
        (shown,) = [one for one in menu(f"/outbox/{path}") if one.current]
        assert (shown.label, [(one.label, one.current) for one in shown.pages if one.current]) == (
            section, [(label, "true")],
        )  # fmt: skip
    assert [one.label for one in menu("/outbox/") if one.current] == ["Now"]
    assert [one for one in menu("/outbox/act/skip/") if one.current] == []


def test_findings_of_one_cause_are_one_card(world: World, operator: Client) -> None:
    given = {"output": "o", "run": "r", "severity": "error"}
    for number in range(20):
        Finding.objects.create(**given, rule="orders", finding_class="UNDELIVERED", group="mail", key=f"order-{number}")
    Finding.objects.create(**given, rule="refunds", finding_class="LOST", key="refund-1")
    html = page(operator, "findings/")
    cards = re.findall(r'<section class="error".*?</section>', html, re.DOTALL)
    assert [(card.count('<div class="finding">'), "× 20" in card) for card in cards] == [(20, True), (1, False)]
    assert cards[0].count("A consumer group shows no effect") == 1
