"""As worker_settings, for a project that has tasks alone."""

from __future__ import annotations

import django

from tests.django.worker_settings import *  # noqa: F403
from tests.part_apps import part_apps

INSTALLED_APPS = [
    *(["django_tasks"] if django.VERSION < (6, 0) else []),
    *("outbox.contrib.django", *part_apps(), "tests.django.shop"),
]
OUTBOX["TOPICS"] = {"tasks": {"types": ["NORMAL", "DELAY", "TRANSACTION"], "queue_count": 2}}  # noqa: F405
TASKS = {
    "default": {
        "BACKEND": "outbox.contrib.tasks.backend.OutboxBackend",
        "QUEUES": ["default", "mail"],
        "OPTIONS": {"max_attempts": 2, "delays_seconds": [0.5]},
    },
}
