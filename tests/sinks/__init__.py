"""Sinks: where messages are forwarded to, on real servers."""
