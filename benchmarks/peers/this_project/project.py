"""Settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

APPS = ["outbox.contrib.django"]
TOPIC = "order.paid"


def settings(databases: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "DATABASE_ROUTERS": ["outbox.contrib.django.routers.BrokerRouter"],
        "OUTBOX": {
            "BROKER": "broker" if "broker" in databases else "default",
            "PRODUCER_GROUP": "bench",
            "TOPICS": {TOPIC: {"types": ["NORMAL", "TRANSACTION"]}},
        },
    }
