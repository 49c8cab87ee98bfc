"""Settings of the shop; the databases come from the environment."""

from __future__ import annotations

import os
from typing import Any

from outbox.contrib.django.databases import database_from_url
from tests.crash_kit.blind.names import CASES
from tests.part_apps import part_apps

SECRET_KEY = "tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["outbox.contrib.django", *part_apps("saga"), "tests.crash_kit.blind"]
DATABASES = {
    alias: database_from_url(os.environ[f"TEST_{alias.upper()}_URL"]) for alias in ("default", "broker", "reports")
}
DATABASE_ROUTERS = ["outbox.contrib.django.routers.BrokerRouter"]
_TOPICS: dict[str, Any] = {case.topic: {"queue_count": 1, **case.topic_options} for case in CASES}
OUTBOX = {
    "BROKER": "broker",
    "PRODUCER_GROUP": "shop",
    "TOPICS": {**_TOPICS, "bad.money": {"queue_count": 1}, "good.money": {"queue_count": 1}},
}
