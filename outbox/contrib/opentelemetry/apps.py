"""The Django application of the traces and metrics for OpenTelemetry."""

from __future__ import annotations

from django.apps import AppConfig

from outbox import tracing
from outbox.errors import ConfigurationError
from outbox.utils import measures


class OutboxOpenTelemetryConfig(AppConfig):
    """OpenTelemetry. To use it, add 'outbox.contrib.opentelemetry' to INSTALLED_APPS."""

    name = "outbox.contrib.opentelemetry"
    label = "outbox_opentelemetry"
    verbose_name = "Outbox traces"

    def ready(self) -> None:
        """Trace and measure the work of this process. Raises ConfigurationError."""
        try:
            from outbox.contrib.opentelemetry.recorder import of_this_process
            from outbox.contrib.opentelemetry.tracer import OpenTelemetryTracer
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"outbox.contrib.opentelemetry needs opentelemetry-api ({error}): install "
                "outbox-transactional[tracing]."
            ) from error
        if tracing.tracer is None:
            tracing.install(OpenTelemetryTracer())
        measures.add(of_this_process())
