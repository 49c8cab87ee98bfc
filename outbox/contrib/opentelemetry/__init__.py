"""Traces and metrics of messages by OpenTelemetry's API (the extra `tracing`). The application sets up an SDK."""
