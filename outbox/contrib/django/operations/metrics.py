"""Measuring what a process does, for Prometheus, where `prometheus-client` is installed (the extra `metrics`).

What a process measures goes to prometheus_client's own registry, where the application's metrics are too. With several
processes set PROMETHEUS_MULTIPROC_DIR, as for every application of prometheus_client; a worker does so for its own.
"""

from __future__ import annotations

import importlib.util
from typing import Final

from outbox import measures
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import ConfigurationError

DIRECTORY_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"

_recording = False


def require() -> None:
    """Raise ConfigurationError where prometheus-client is not installed."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigurationError("metrics need prometheus-client: install outbox-transactional[metrics].")


def record() -> None:
    """From now on measure this process's work. Raises ConfigurationError without prometheus-client."""
    global _recording
    if _recording:
        return
    require()
    from prometheus_client import REGISTRY

    from outbox.contrib.prometheus.recorder import PrometheusRecorder

    _recording = True
    measures.install(PrometheusRecorder(REGISTRY))


def record_if_wanted() -> None:
    """`record` where OUTBOX['METRICS'] says so. Settings that cannot be read are what `manage.py check` reports."""
    try:
        wanted = get_settings().metrics
    except ConfigurationError:
        return
    if wanted:
        record()
