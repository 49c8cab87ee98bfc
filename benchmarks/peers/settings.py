"""Django's settings for every peer that is a Django application."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from psycopg.conninfo import conninfo_to_dict


def _database(variable: str) -> dict[str, Any]:
    info = conninfo_to_dict(os.environ[variable])
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}
    entry: dict[str, Any] = {key: str(info.pop(name, "") or "") for name, key in names.items()}
    info["application_name"] = f"bench-{os.environ['OUTBOX_BENCH_ROLE']}"
    return {"ENGINE": "django.db.backends.postgresql", **entry, "OPTIONS": info, "CONN_MAX_AGE": None}


_PEER = os.environ["OUTBOX_BENCH_PEER"]

SECRET_KEY = "benchmarks"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": _database("OUTBOX_BENCH_APPLICATION")}
if os.environ["OUTBOX_BENCH_BROKER"] != os.environ["OUTBOX_BENCH_APPLICATION"]:
    DATABASES["broker"] = _database("OUTBOX_BENCH_BROKER")
INSTALLED_APPS = ["benchmarks.shop", f"benchmarks.peers.{_PEER}"]

_of_peer = import_module(f"benchmarks.peers.{_PEER}.project")
INSTALLED_APPS += _of_peer.APPS
globals().update(_of_peer.settings(DATABASES))
