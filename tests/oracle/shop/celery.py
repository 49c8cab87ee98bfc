"""The Celery app, whose worker runs everything with `--outbox`. No task is sent, so its transport is in memory."""

from __future__ import annotations

import os

from celery import Celery

from outbox.contrib.django import celery as outbox_celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.oracle.shop.settings")

app = Celery("shop", broker="memory://", task_cls="outbox.contrib.django.celery:TransactionalTask")
app.config_from_object("django.conf:settings", namespace="CELERY")
outbox_celery.setup(app)
