"""Traces of messages by OpenTelemetry's API (the extra `tracing`). The application chooses and sets up an SDK."""
