"""Settings of the processes that these tests start."""

from __future__ import annotations

import os

from tests.django.worker_settings import *  # noqa: F403
from tests.django.worker_settings import INSTALLED_APPS, OUTBOX
from tests.rocketmq.topics import declared

INSTALLED_APPS = [*(app for app in INSTALLED_APPS if app != "tests.django.effects"), "tests.rocketmq.effects"]
OUTBOX = {
    **{name: value for name, value in OUTBOX.items() if name not in ("BROKER", "TOPICS")},
    "BROKER": os.environ["TEST_ROCKETMQ"] or "broker",
    "PRODUCER_GROUP": "shop",
    "SEND_TIMEOUT_SECONDS": 20,
    "TOPICS": declared(os.environ["TEST_TOPICS"].split(",")),
}
