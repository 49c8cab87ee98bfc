"""Django for the benchmarks: one application database, and a broker that shares it or not."""

from __future__ import annotations

import django
from django.conf import settings

from outbox.contrib.django.databases import database_from_url

TOPIC = "order.paid"


def configure(application_url: str, broker_url: str, *, rocketmq: str = "") -> None:
    """Configure and migrate. Equal URLs give the atomic path, different ones the two-phase path, `rocketmq` another
    engine."""
    databases = {"default": database_from_url(application_url, CONN_MAX_AGE=None)}
    if broker_url != application_url:
        databases["broker"] = database_from_url(broker_url, CONN_MAX_AGE=None)
    settings.configure(
        INSTALLED_APPS=[
            *("benchmarks.shop", "outbox.contrib.django"),
            *(["outbox.contrib.rocketmq"] if rocketmq else []),
        ],
        DATABASES=databases,
        DATABASE_ROUTERS=["outbox.contrib.django.routers.BrokerRouter"],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        USE_TZ=True,
        OUTBOX={
            "BROKER": rocketmq or ("broker" if "broker" in databases else "default"),
            "PRODUCER_GROUP": "bench",
            # The first messages meet a server that is still warming up.
            "SEND_TIMEOUT_SECONDS": 20,
            "TOPICS": {TOPIC: {"types": ["NORMAL", "TRANSACTION"]}},
        },
    )
    django.setup()
    from django.core.management import call_command

    for alias in databases:
        call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
