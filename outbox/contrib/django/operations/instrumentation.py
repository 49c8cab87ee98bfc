"""Starts the metrics and the traces of this process, in every process of a project.

Metrics need `prometheus-client` (the extra `metrics`). A process writes its metrics to prometheus_client's default
registry, as the application does with its own metrics. If several processes serve metrics, set
PROMETHEUS_MULTIPROC_DIR, as prometheus_client requires. A worker sets this variable for its own processes.
"""

from __future__ import annotations

import importlib.util
from typing import Final

from outbox import tracing
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import ConfigurationError
from outbox.utils import measures

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
