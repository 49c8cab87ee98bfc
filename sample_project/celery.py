"""The Celery app: `celery -A sample_project worker --outbox --without-gossip --without-mingle`.

The last two options are needed for the default transport, which cannot broadcast.
"""

from __future__ import annotations

import os

from celery import Celery

from outbox.contrib.django import celery as outbox_celery
from sample_project import server

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sample_project.settings")
server.start()

app = Celery("sample_project")
app.config_from_object("django.conf:settings", namespace="CELERY")
outbox_celery.setup(app)
