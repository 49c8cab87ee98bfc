"""Traces of messages by OpenTelemetry's API (the extra `tracing`); the application chooses and sets up an SDK."""
