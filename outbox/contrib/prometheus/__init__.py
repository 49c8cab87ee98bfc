"""Metrics for Prometheus: what each process measures, and what the broker's tables say. Needs `prometheus-client`."""
