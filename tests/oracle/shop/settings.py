"""A project as the documents describe one, with a second application database.

ORACLE_SERVER   the PostgreSQL server
ORACLE_PREFIX   the prefix of the databases' names
ORACLE_PATH     atomic or two-phase
ORACLE_RUNNING  the limit of `mail` (read by the subscribers)
"""

from __future__ import annotations

import os
from typing import Any

from psycopg.conninfo import make_conninfo

from outbox.contrib.django.databases import database_from_url

SECRET_KEY = "only for the oracle"
INSTALLED_APPS = [
    "outbox.contrib.django",
    *(f"outbox.contrib.{name}" for name in ("limits", "saga", "unique")),
    "tests.oracle.shop",
]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True


def _database(name: str) -> dict[str, Any]:
    prefix = os.environ["ORACLE_PREFIX"]
    return dict(database_from_url(make_conninfo(os.environ["ORACLE_SERVER"], dbname=f"{prefix}_{name}")))


DATABASES = {"default": _database("shop"), "second": _database("second")}
BROKER = "default"
if os.environ["ORACLE_PATH"] == "two-phase":
    BROKER = "broker"
    DATABASES["broker"] = _database("broker")
DATABASE_ROUTERS = ["outbox.contrib.django.routers.BrokerRouter"]

OUTBOX: dict[str, Any] = {
    "BROKER": BROKER,
    "PRODUCER_GROUP": "shop",
    "TOPICS": {
        "orders": {"queue_count": 4},
        "steps": {"types": ["FIFO", "TRANSACTION"], "queue_count": 3},
        "later": {"types": ["DELAY", "TRANSACTION"], "queue_count": 2},
        "invoices": {"queue_count": 2},
        "bookings": {"types": ["NORMAL", "DELAY", "TRANSACTION"], "queue_count": 2},
    },
    # Short, so that a storm of a minute sees several terms of each.
    "LEASE_SECONDS": 3,
    "IMMUNITY_SECONDS": 2,
    "CHECK_INTERVAL_SECONDS": 1,
    "CELERY_APP": "tests.oracle.shop.celery.app",
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{asctime} {process:>6} {levelname:<7} {name}: {message}", "style": "{"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": "INFO"},
}
