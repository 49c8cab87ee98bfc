"""The pages are the same in every language of the project: values for programs are never localised."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from django.conf import settings
from django.core.management import call_command
from django.test import Client
from django.test.utils import override_settings
from django.utils import translation

from outbox.contrib.console.urls import LISTED
from outbox.contrib.django.models import RaisedCondition
from tests.django.broker_world import World
from tests.django.console.test_hostile_values import PAGES, crowd

pytestmark = pytest.mark.usefixtures("no_subscribers", "one_session")

EVERY = tuple((code, grouping) for code, _ in settings.LANGUAGES for grouping in (False, True))
# These group and separate numbers by a comma, a dot, a space, and in groups of two digits.
TELLING = (("de", False), ("de", True), ("fr", True), ("ar", True), ("hi", True), ("en-gb", True))


def stable(html: str) -> str:
    """Without the token of forms, and without what the time changes."""
    html = re.sub(r'name="csrfmiddlewaretoken" value="\w*"', "", html)
    html = re.sub(r">(?:[^<>]* ago|in [^<>]*)</time>", "></time>", html)
    return re.sub(r"\d+ (?:ms|s|min)\b|\d+\.\d s|\d\d:\d\d:\d\d(?!\d)", "", html)


@override_settings(USE_TZ=False, TIME_ZONE="Pacific/Chatham")
def test_without_time_zones_the_pages_answer_in_the_time_of_the_project(world: World, operator: Client) -> None:
    call_command("outbox_transaction", "reject", "--no-input", stdout=StringIO())
    needing = {"group", "topic", *(one.name for one in LISTED if any(field.required for field in one.fields))}
    for name, address in PAGES.items():
        assert operator.get(address).status_code == (400 if name in needing else 200), name
    [shown] = re.findall(r'<time datetime="([^"]+)"', operator.get(PAGES["audit"]).content.decode())
    at = datetime.fromisoformat(shown)
    assert at.utcoffset() in (timedelta(hours=12, minutes=45), timedelta(hours=13, minutes=45))
    assert abs(datetime.now(UTC) - at) < timedelta(minutes=5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_page_is_the_same_in_every_language(world: World, operator: Client) -> None:
    assert len(EVERY) >= 2 * 99
    every_page_is_the_same(world, operator, EVERY)


def every_page_is_the_same(world: World, operator: Client, languages: Sequence[tuple[str, bool]]) -> None:
    """Ask for each page once, and render its context in each language, with groups of digits and without."""
    numbers = 0
    for address in crowd(world, ["no answer", "9999-12-31T23:59:59+00:00"]):
        answer = operator.get(address)
        if not answer.context:
            continue
        template: Any = answer.templates[0]
        context: Any = next(iter(answer.context))
        english = stable(template.render(copy.copy(context)))
        numbers += len(re.findall(r"[/\"=-]12345\d\d\b", english))
        for language, grouping in languages:
            with override_settings(USE_THOUSAND_SEPARATOR=grouping), translation.override(language):
                assert stable(template.render(copy.copy(context))) == english, (address, language, grouping)
    assert numbers > 1, "numbers of more than three digits are in attributes"


@pytest.fixture(autouse=True)
def emptied(world: World) -> Iterator[None]:
    """Leave no row in the application's database."""
    yield
    RaisedCondition.objects.all().delete()


def test_a_request_in_another_language_gets_the_english_page(world: World, operator: Client) -> None:
    middleware = ["django.middleware.locale.LocaleMiddleware", *settings.MIDDLEWARE]
    with override_settings(MIDDLEWARE=middleware, USE_THOUSAND_SEPARATOR=True):
        for part in ({}, {"Outbox-Part": "true"}):
            answer = operator.get("/outbox/", headers={"Accept-Language": "de", **part})
            assert answer["Content-Language"] == "en"
            assert part or b'data-check-every="1.0"' in answer.content
        assert operator.get("/outbox/liveness/", headers={"Accept-Language": "ar"}).json()["at"].isascii()
    with override_settings(LANGUAGE_CODE="de"):
        assert 'data-check-every="1.0"' in operator.get("/outbox/").content.decode()
