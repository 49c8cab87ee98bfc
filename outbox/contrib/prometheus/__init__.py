"""Metrics for Prometheus: figures of each process, and of the broker's tables. Needs `prometheus-client`."""
