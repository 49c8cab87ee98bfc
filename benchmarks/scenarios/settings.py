"""Django's settings of the adapters: defaults, but for concurrency and the time until a dead worker is given up."""

from __future__ import annotations

import os
from typing import Any

from psycopg.conninfo import conninfo_to_dict

from benchmarks.scenarios.contract import TAKEOVER_SECONDS, number

_WORKERS = max(int(number("WORKER_COUNT", 32)), 1)
_OF_SYSTEM: dict[str, tuple[str, dict[str, Any]]] = {
    "this_project": (
        "outbox.contrib.django",
        {
            "OUTBOX": {
                "PRODUCER_GROUP": "scenarios",
                "TOPICS": {"order.paid": {"types": ["NORMAL", "TRANSACTION"]}},
                "HANDLER_THREADS": _WORKERS,
                "LEASE_SECONDS": TAKEOVER_SECONDS,
            }
        },
    ),
    "reliable": ("reliable_outbox", {"RELIABLE_OUTBOX": {"LEASE_SECONDS": float(TAKEOVER_SECONDS)}}),
    "procrastinate_jobs": (
        "procrastinate.contrib.django",
        {
            "PROCRASTINATE_WORKER_DEFAULTS": {
                "update_heartbeat_interval": TAKEOVER_SECONDS / 3,
                "stalled_worker_timeout": float(TAKEOVER_SECONDS),
            }
        },
    ),
}


def _database() -> dict[str, Any]:
    info = conninfo_to_dict(os.environ["DATABASE_URL"])
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    entry: dict[str, Any] = {key: str(info.pop(name, "") or "") for name, key in names.items()}
    persistent = {"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True}
    return {"ENGINE": "django.db.backends.postgresql", **entry, "OPTIONS": info, **persistent}


_APP, _SETTINGS = _OF_SYSTEM[os.environ["SCENARIO_SYSTEM"]]

SECRET_KEY = "benchmarks"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": _database()}
INSTALLED_APPS = ["benchmarks.scenarios", _APP]
globals().update(_SETTINGS)
