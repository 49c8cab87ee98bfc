"""Settings of the shop on which the runbooks are run: those of deploy/, with the models and handlers of the tests."""

from __future__ import annotations

import os

import django

from deploy.settings import *  # noqa: F403
from deploy.settings import INSTALLED_APPS as APPS
from deploy.settings import OUTBOX
from tests.part_apps import part_apps

SECRET_KEY = "tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
_TASKS = ["django_tasks"] if django.VERSION < (6, 0) else []
# Of the parts, deploy/ names some itself.
INSTALLED_APPS = list(dict.fromkeys([*_TASKS, *APPS, *part_apps(), "tests.django.shop", "tests.runbooks"]))
# `migrate` makes the tables of the test models with --run-syncdb.
MIGRATION_MODULES = {"shop": None}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["stderr"], "level": "INFO"},
}
OUTBOX |= {
    "TOPICS": {
        "orders": {"types": ["NORMAL", "TRANSACTION", "DELAY"], "queue_count": int(os.environ.get("SHOP_QUEUES", "4"))},
        "orders.v2": {"types": ["NORMAL", "TRANSACTION"], "queue_count": 4},
    },
    "IMMUNITY_SECONDS": 0,
    "CHECK_INTERVAL_SECONDS": 0.5,
    "LEASE_SECONDS": 2,
}
