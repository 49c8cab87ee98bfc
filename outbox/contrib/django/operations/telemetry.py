"""Metrics and traces of a project: numbers about its processes, numbers from the broker's tables, and spans.

Metrics need `prometheus-client` (the extra `metrics`). A process writes its metrics to prometheus_client's default
registry, as the application does with its own metrics. If several processes serve metrics, set
PROMETHEUS_MULTIPROC_DIR, as prometheus_client requires. A worker sets this variable for its own processes.
"""

from __future__ import annotations

import hmac
import importlib.util
import os
from typing import TYPE_CHECKING, Any, Final

from django.db import connections
from django.db.utils import DatabaseError

from outbox import tracing
from outbox.broker.database.statement import Statement
from outbox.broker.database.timeouts import lock_limited
from outbox.broker.operations import audit
from outbox.broker.operations.rules import survey, unusable
from outbox.broker.operations.summary import overview
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.operations.watching import asking, with_application
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import BrokerUnavailable, ConfigurationError, SchemaError
from outbox.utils import measures

if TYPE_CHECKING:
    from outbox.contrib.prometheus.collector import BrokerCollector, ScrapeState

# ---------------------------------------------------------------------------------------------------------------------
# The functions below start the metrics that a process measures about itself.

DIRECTORY_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"

_recording = False


def require() -> None:
    """Raise ConfigurationError if prometheus-client is not installed."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigurationError("metrics need prometheus-client: install outbox-transactional[metrics].")


def record() -> None:
    """Start the metrics of this process. Raises ConfigurationError if prometheus-client is not installed."""
    global _recording
    if _recording:
        return
    require()
    from prometheus_client import REGISTRY

    from outbox.contrib.prometheus.recorder import PrometheusRecorder

    _recording = True
    measures.install(PrometheusRecorder(REGISTRY))


def record_if_wanted() -> None:
    """Call `record` if OUTBOX['METRICS'] is on.

    If the settings are invalid, do nothing: `manage.py check` reports them.
    """
    try:
        wanted = get_settings().metrics
    except ConfigurationError:
        return
    if wanted:
        record()


# ---------------------------------------------------------------------------------------------------------------------
# The functions below serve a project's metrics to Prometheus: metrics of its processes, and metrics of the broker's
# tables.

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_SIZES: Final = Statement("""
SELECT relname::text, pg_total_relation_size(oid) FROM pg_class
WHERE relnamespace = '{schema}'::regnamespace AND relkind IN ('r', 'p') ORDER BY 1
""")
_APPLICATION_SIZES: Final = """
SELECT name, pg_total_relation_size(name::regclass) FROM unnest(ARRAY['outbox_ledger', 'outbox_inbox']) AS name
WHERE to_regclass(name) IS NOT NULL
"""

_collector: BrokerCollector | None = None


def is_authorized(header: str) -> bool:
    """Return whether an Authorization header has the token of OUTBOX['METRICS_TOKEN'].

    Without this setting, return False.
    """
    token = get_settings().metrics_token
    return token is not None and hmac.compare_digest(header.encode(), f"Bearer {token}".encode())


def render() -> bytes:
    """Return all metrics in Prometheus's format: the metrics of the broker and the metrics of this process.

    If PROMETHEUS_MULTIPROC_DIR is set, the result has the metrics of all processes that share this directory.

    Raises ConfigurationError if prometheus-client is not installed.
    """
    require()
    from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    from outbox.contrib.prometheus.collector import BrokerCollector

    global _collector
    _collector = _collector or BrokerCollector(state)
    registry = CollectorRegistry()
    registry.register(_collector)
    if DIRECTORY_VARIABLE in os.environ:
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
    return generate_latest(REGISTRY) + generate_latest(registry)


def state() -> ScrapeState:
    """Return the present state of the broker's tables, for the metrics."""
    from outbox.contrib.prometheus.collector import ScrapeState

    try:
        with asking() as run:
            found = survey(run, get_settings().thresholds)
            if found.summary is None:
                return ScrapeState(found.verdict)
            with lock_limited(run.connection):
                sizes = dict(run.rows(_SIZES)) | _application_sizes()
                verdict = with_application(found.verdict, run)
                return ScrapeState(verdict, overview(run, found.summary), found.summary, audit.last(run), sizes)
    except (BrokerUnavailable, SchemaError) as error:
        return ScrapeState(unusable(error))


def _application_sizes() -> dict[str, Any]:
    """Return the sizes of the ledger tables and inbox tables that are on PostgreSQL."""
    sizes: dict[str, Any] = {}
    for alias in ledger_aliases():
        if connections[alias].vendor != "postgresql":
            continue
        try:
            with connections[alias].cursor() as cursor:
                cursor.execute(_APPLICATION_SIZES)
                sizes |= {f"{alias}.{name}": size for name, size in cursor.fetchall()}
        except DatabaseError:
            continue
    return sizes


# ---------------------------------------------------------------------------------------------------------------------
# The function below turns on traces of this process's messages (OUTBOX['TRACING']).


def trace_if_wanted() -> None:
    """Trace messages if OUTBOX['TRACING'] is on.

    If the settings are invalid, do nothing: `manage.py check` reports them. Raises ConfigurationError if
    opentelemetry-api is not installed.
    """
    try:
        wanted = get_settings().tracing
    except ConfigurationError:
        return
    if not wanted or tracing.tracer is not None:
        return
    try:
        from outbox.contrib.opentelemetry.tracer import OpenTelemetryTracer
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"OUTBOX['TRACING'] needs opentelemetry-api ({error}): install outbox-transactional[tracing]."
        ) from error
    tracing.install(OpenTelemetryTracer())
