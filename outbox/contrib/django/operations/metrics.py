"""Measures a process for Prometheus, if `prometheus-client` is installed (the extra `metrics`).

The figures go to prometheus_client's own registry, with the application's metrics. With several processes set
PROMETHEUS_MULTIPROC_DIR, as for every application of prometheus_client; a worker sets it for its own processes.
"""

from __future__ import annotations

import importlib.util
from typing import Final

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
    """Measure this process from now on. Raises ConfigurationError without prometheus-client."""
    global _recording
    if _recording:
        return
    require()
    from prometheus_client import REGISTRY

    from outbox.contrib.prometheus.recorder import PrometheusRecorder

    _recording = True
    measures.install(PrometheusRecorder(REGISTRY))


def record_if_wanted() -> None:
    """Call `record` if OUTBOX['METRICS'] is on. `manage.py check` reports settings that cannot be read."""
    try:
        wanted = get_settings().metrics
    except ConfigurationError:
        return
    if wanted:
        record()
