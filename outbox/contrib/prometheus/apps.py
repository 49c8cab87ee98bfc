"""The Django application of the metrics for Prometheus."""

from __future__ import annotations

import importlib.util

from django.apps import AppConfig

from outbox import hooks
from outbox.errors import ConfigurationError
from outbox.utils import measures


class OutboxPrometheusConfig(AppConfig):
    """Metrics for Prometheus. To use them, add 'outbox.contrib.prometheus' to INSTALLED_APPS."""

    name = "outbox.contrib.prometheus"
    label = "outbox_prometheus"
    verbose_name = "Outbox metrics"

    def ready(self) -> None:
        """Measure the work of this process, and let workers serve all figures. Raises ConfigurationError."""
        if importlib.util.find_spec("prometheus_client") is None:
            raise ConfigurationError(
                "outbox.contrib.prometheus needs prometheus-client: install outbox-transactional[metrics]."
            )
        from outbox.contrib.prometheus.recorder import of_this_process

        measures.add(of_this_process())
        hooks.add_served("/metrics", "outbox.contrib.prometheus.serving.answer")
        hooks.add_shared_folder("PROMETHEUS_MULTIPROC_DIR", "metrics")
