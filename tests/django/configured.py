"""The Django settings of this folder's tests, configured once per process.

The other folders do not use Django, so there is no DJANGO_SETTINGS_MODULE: importing this module configures.
"""

from __future__ import annotations

import os
from typing import Any

import django
from django.conf import settings

from tests import mariadb
from tests.part_apps import part_apps

OUTBOX: dict[str, Any] = {
    "BROKER": "broker",
    "PRODUCER_GROUP": "shop",
    "TOPICS": {
        "orders": {"queue_count": 4},
        "payments": {"queue_count": 2},
        "bound": {"types": ["TRANSACTION"], "queue_count": 1},
        "steps": {"types": ["FIFO", "TRANSACTION"], "queue_count": 4},
        "tasks": {"types": ["NORMAL", "DELAY", "TRANSACTION"], "queue_count": 2},
        "reminders": {"types": ["DELAY", "NORMAL", "TRANSACTION"], "queue_count": 1},
    },
    "IMMUNITY_SECONDS": 0,
    "CHECK_INTERVAL_SECONDS": 0.5,
}

TASKS: dict[str, Any] = (
    {"default": {"BACKEND": "outbox.contrib.tasks.backend.OutboxBackend", "QUEUES": ["default", "mail"]}}
    if part_apps("tasks")
    else {}
)

# The names are filled in by `databases` in conftest.py, once there is a server.
POSTGRESQL = {"ENGINE": "django.db.backends.postgresql", "NAME": "not-there-yet"}

# `.ci/matrix mariadb` runs the tests of other databases than PostgreSQL with MariaDB in the place of SQLite.
ON_MARIADB = bool(os.environ.get(mariadb.VARIABLE))
MARIADB = {"ENGINE": "django.db.backends.mysql", "NAME": "not-there-yet"}
SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:", "OPTIONS": {"timeout": 20}}

if not settings.configured:
    settings.configure(
        SECRET_KEY="tests",
        USE_TZ=True,
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        INSTALLED_APPS=[
            *(["django_tasks"] if django.VERSION < (6, 0) else []),
            *("django.contrib.contenttypes", "django.contrib.auth", "django.contrib.staticfiles"),
            *("outbox.contrib.django", *part_apps(), "tests.django.shop", "tests.django.hotel"),
            "tests.django.pages",
        ],
        TASKS=TASKS,
        # Django's own tables are made at once: its twenty migrations take longer than all that outbox makes.
        MIGRATION_MODULES=dict.fromkeys(("shop", "hotel", "pages", "auth", "contenttypes")),
        DATABASES={
            # The application's, the broker's own, a second application database, and one that is no PostgreSQL.
            "default": dict(POSTGRESQL),
            "broker": dict(POSTGRESQL),
            "other": dict(POSTGRESQL),
            "lite": MARIADB if ON_MARIADB else SQLITE,
        },
        DATABASE_ROUTERS=["outbox.contrib.django.routers.BrokerRouter"],
        ROOT_URLCONF="tests.django.urls",
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
        ],
        # Logged in without a table of sessions, and quickly.
        SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
        TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}],
        STATIC_URL="static/",
        ALLOWED_HOSTS=["testserver"],
        OUTBOX=OUTBOX,
    )
    django.setup()
