"""The part of a project's settings that the files of this folder need: addresses come from the environment."""

from __future__ import annotations

import os
from typing import Any

from outbox.contrib.django.databases import database_from_url

DATABASES = {
    "default": database_from_url(os.environ["APPLICATION_URL"], CONN_MAX_AGE=60, CONN_HEALTH_CHECKS=True),
    "broker": database_from_url(os.environ["OUTBOX_BROKER_URL"], CONN_HEALTH_CHECKS=True),
}
DATABASE_ROUTERS = ["outbox.contrib.django.routers.BrokerRouter"]

# Beside the apps of your project.
INSTALLED_APPS = ["outbox.contrib.django", "outbox.contrib.erasure", "outbox.contrib.prometheus"]
OUTBOX: dict[str, Any] = {
    "BROKER": "broker",
    "PRODUCER_GROUP": "shop",
    # At least the largest number of consumer processes (kubernetes/autoscaling.yaml), or some have no work.
    "TOPICS": {"orders": {"queue_count": 8}},
    # The address of /live, /ready and /metrics, and the folder of the heartbeats that answer them.
    "HEALTH_ADDRESS": os.environ.get("HEALTH_ADDRESS"),
    "HEALTH_DIRECTORY": os.environ.get("HEALTH_DIRECTORY"),
}
# Behind a pooler: the worker's login, straight to the broker's server. Only workers and `outbox_doctor` need it.
if "LISTEN_URL" in os.environ:
    OUTBOX["LISTEN_URL"] = os.environ["LISTEN_URL"]
# Prometheus asks from another machine, so it needs the token.
if "STATUS_TOKEN" in os.environ:
    OUTBOX["STATUS_TOKEN"] = os.environ["STATUS_TOKEN"]
# Erasures are repeated after a restore. All workers read one list.
if "ERASURE_LIST" in os.environ:
    OUTBOX["ERASURE_LIST"] = os.environ["ERASURE_LIST"]
    # `outbox-reconcile archive --erase` reads the same variable.
    OUTBOX["ERASURE_SECRET"] = os.environ.get("OUTBOX_ERASURE_SECRET")
# Bodies that are published with a Subject are encrypted with keys of this database. INSTALLED_APPS of the project then
# needs "outbox.contrib.encryption".
if "KEYS_URL" in os.environ:
    DATABASES["keys"] = database_from_url(os.environ["KEYS_URL"], CONN_HEALTH_CHECKS=True)
    OUTBOX["KEY_DATABASE"] = "keys"
    OUTBOX["KEY_ENCRYPTION_KEYS"] = os.environ["OUTBOX_KEY_ENCRYPTION_KEY"].split()
