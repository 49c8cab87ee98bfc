"""Settings of the project whose handlers are the cases; the databases come from the environment."""

from __future__ import annotations

import os

from outbox.contrib.django.databases import database_from_url
from tests.crash_kit.names import CASES

SECRET_KEY = "tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["outbox.contrib.django", "tests.crash_kit.shop.apps.ShopConfig"]
MIGRATION_MODULES = {"crash_shop": None}
DATABASES = {
    "default": database_from_url(os.environ["TEST_DEFAULT_URL"]),
    "broker": database_from_url(os.environ["TEST_BROKER_URL"]),
    "other": database_from_url(os.environ["TEST_OTHER_URL"]),
}
DATABASE_ROUTERS = ["outbox.contrib.django.routers.BrokerRouter"]
OUTBOX = {
    "BROKER": "broker",
    "PRODUCER_GROUP": "shop",
    "TOPICS": {
        name: {"queue_count": 1} for name in [*(case.partition(".")[2] for case in CASES), "chain.receipts", "options"]
    },
}
