"""Settings of the processes that the tests of the relay start: one topic in order of keys, one with delivery times."""

from __future__ import annotations

import os

from tests.django.worker_settings import *  # noqa: F403
from tests.django.worker_settings import INSTALLED_APPS, OUTBOX
from tests.rocketmq.topics import relayed

INSTALLED_APPS = [*(app for app in INSTALLED_APPS if app != "tests.django.effects"), "tests.rocketmq.relay_effects"]
OUTBOX = {**OUTBOX, **relayed(os.environ["TEST_ROCKETMQ"], *os.environ["TEST_TOPICS"].split(","))}
