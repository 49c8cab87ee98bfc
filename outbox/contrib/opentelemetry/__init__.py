"""Traces and metrics for OpenTelemetry, through the providers that the application sets up.

    INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.opentelemetry"]

`tracer` and `recorder` need no Django.
"""
