"""Metrics for Prometheus:

each process's own figures, and figures from the broker's tables. Needs `prometheus-client`.
"""
