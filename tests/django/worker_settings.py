"""Settings of the processes that these tests start; the databases come from the environment."""

from __future__ import annotations

import json
import os
from pathlib import Path

from outbox.contrib.django.databases import database_from_url
from tests.part_apps import part_apps

SECRET_KEY = "tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    *("outbox.contrib.django", *part_apps(), "tests.django.shop", "tests.django.effects", "tests.django.hotel"),
    *os.environ.get("TEST_APPS", "").split(),
]
MIGRATION_MODULES = {"shop": None, "hotel": None, "pages": None}
DATABASES = {
    "default": {
        **database_from_url(os.environ["TEST_DEFAULT_URL"], CONN_MAX_AGE=60),
        **json.loads(os.environ.get("TEST_DEFAULT", "{}")),
    },
    "broker": database_from_url(os.environ["TEST_BROKER_URL"]),
}
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.InMemoryStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
    "large": {
        "BACKEND": "django.core.files.storage.FileSystemStorage",
        "OPTIONS": {"location": os.environ.get("TEST_LARGE_BODIES", "")},
    },
}
DATABASE_ROUTERS = ["outbox.contrib.django.routers.BrokerRouter"]
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["stderr"], "level": "INFO"},
}
OUTBOX = {
    "BROKER": "broker",
    "PRODUCER_GROUP": "shop",
    "TOPICS": {
        "orders": {"queue_count": 4},
        "payments": {"queue_count": 2},
        "steps": {"types": ["FIFO", "TRANSACTION"], "queue_count": 4},
    },
    "IMMUNITY_SECONDS": 0,
    "CHECK_INTERVAL_SECONDS": 0.5,
    "LEASE_SECONDS": 2,
    **json.loads(os.environ.get("TEST_OUTBOX", "{}")),
}

if "TEST_METRICS" in os.environ:
    # As an application sets up its SDK: each export is a line of the file.
    from opentelemetry.metrics import set_meter_provider
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader

    metric_exporter = ConsoleMetricExporter(
        out=Path(os.environ["TEST_METRICS"]).open("a"),  # noqa: SIM115
        formatter=lambda data: data.to_json(indent=None) + "\n",
    )
    set_meter_provider(MeterProvider([PeriodicExportingMetricReader(metric_exporter, export_interval_millis=200)]))

if "TEST_SPANS" in os.environ:
    # As an application sets up its SDK: each span that has ended is a line of the file.
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    exporter = ConsoleSpanExporter(
        out=Path(os.environ["TEST_SPANS"]).open("a"),  # noqa: SIM115
        formatter=lambda span: span.to_json(indent=None) + "\n",
    )
    trace.set_tracer_provider(TracerProvider())
    trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(exporter))  # type: ignore[attr-defined]
