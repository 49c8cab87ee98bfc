"""While a database is away, every view answers with 503 or its figures, also with ATOMIC_REQUESTS and middlewares."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.conf import settings
from django.db import connections
from django.test import Client
from django.test.utils import override_settings

from outbox.contrib.django.database.aliases import alias_conninfo
from tests.django.broker_world import NOWHERE, World
from tests.django.conftest import point_alias
from tests.django.console.test_hostile_values import PAGES
from tests.part_apps import has

pytestmark = pytest.mark.usefixtures("no_subscribers")

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    *settings.MIDDLEWARE,
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]


@pytest.mark.parametrize("away", [("broker",), ("broker", "default")])
def test_every_view_answers_although_requests_are_atomic(
    world: World,
    operator: Client,
    outbox_settings: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    away: tuple[str, ...],
) -> None:
    outbox_settings(STATUS_TOKEN="s3cret")
    for alias in connections:
        monkeypatch.setitem(connections.settings[alias], "ATOMIC_REQUESTS", True)
    was = alias_conninfo("default")
    for alias in away:
        point_alias(alias, NOWHERE)
    try:
        _answered(operator, away)
    finally:
        point_alias("default", was)


def _answered(operator: Client, away: tuple[str, ...]) -> None:
    bearer = {"Authorization": "Bearer s3cret"}
    with override_settings(MIDDLEWARE=MIDDLEWARE):
        health, status = operator.get("/outbox/health/"), operator.get("/outbox/status/", headers=bearer)
        assert (health.status_code, health.json()["healthy"]) == (503, False)
        assert (status.status_code, [one["name"] for one in status.json()["conditions"]]) == (503, ["unreachable"])
        if has("prometheus"):
            assert operator.get("/outbox/metrics/", headers=bearer).status_code == 200
        overview = operator.get("/outbox/")
        if "default" in away:
            assert overview.status_code == 503 and b"The application&#x27;s database did not answer" in overview.content
        else:
            assert overview.status_code == 200 and b"unreachable" in overview.content
        for name, address in PAGES.items():
            answer = operator.get(address)
            assert answer.status_code in (200, 400, 503), (name, answer.status_code)
            assert "Content-Security-Policy" in answer.headers
        answer = operator.post("/outbox/act/pause/", {"group": "mail"})
        assert answer.status_code == 503 and "Content-Security-Policy" in answer.headers
