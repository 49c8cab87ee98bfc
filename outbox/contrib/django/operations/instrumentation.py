"""Starts the metrics and the traces of this process, in every process of a project.

Metrics need `prometheus-client` (the extra `metrics`) or `opentelemetry-api` (the extra `tracing`). If both are
installed, a process writes its metrics to both: to prometheus_client's default registry, and to
instruments of OpenTelemetry's global meter provider, as the application does with its own metrics. If several processes
serve Prometheus metrics, set PROMETHEUS_MULTIPROC_DIR, as prometheus_client requires. A worker sets this variable for
its own processes.
"""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Final

from outbox import tracing
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import ConfigurationError
from outbox.utils import measures

DIRECTORY_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"


def require() -> None:
    """Raise ConfigurationError if prometheus-client, which writes Prometheus's format, is not installed."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigurationError("metrics need prometheus-client: install outbox-transactional[metrics].")


def record_if_wanted() -> None:
    """Start the metrics of this process if OUTBOX['METRICS'] is on.

    If the settings are invalid, do nothing: `manage.py check` reports them. Raises ConfigurationError if neither
    prometheus-client nor opentelemetry-api is installed.
    """
    try:
        wanted = get_settings().metrics
    except ConfigurationError:
        return
    if not wanted or measures.recorder is not None:
        return
    recorders: list[measures.Recorder] = []
    with contextlib.suppress(ModuleNotFoundError):
        from prometheus_client import REGISTRY

        from outbox.contrib.prometheus.recorder import PrometheusRecorder

        recorders.append(PrometheusRecorder(REGISTRY))
    with contextlib.suppress(ModuleNotFoundError):
        from outbox.contrib.opentelemetry.recorder import OpenTelemetryRecorder

        recorders.append(OpenTelemetryRecorder())
    if not recorders:
        raise ConfigurationError(
            "OUTBOX['METRICS'] needs prometheus-client or opentelemetry-api: install outbox-transactional[metrics] for "
            "Prometheus, or outbox-transactional[tracing] for OpenTelemetry."
        )
    measures.install(*recorders)


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
