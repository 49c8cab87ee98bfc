"""Traces of this process's messages: OUTBOX['TRACING']."""

from __future__ import annotations

from outbox import tracing
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import ConfigurationError


def trace_if_wanted() -> None:
    """Trace messages if the settings say so. `manage.py check` reports settings that cannot be read.

    Raises ConfigurationError without opentelemetry-api.
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
