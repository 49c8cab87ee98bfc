"""Serves a project's metrics to Prometheus: metrics of its processes, and metrics of the broker's tables."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, Final

from django.db import connections
from django.db.utils import DatabaseError
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from outbox import hooks
from outbox.broker.database.timeouts import lock_limited
from outbox.broker.operations import audit
from outbox.broker.operations.broker_conditions import table_sizes
from outbox.broker.operations.rules import unusable
from outbox.broker.operations.summary import overview
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.operations import known_conditions
from outbox.contrib.django.operations.watching import asking, survey_project
from outbox.contrib.prometheus.collector import BrokerCollector, ScrapeState
from outbox.errors import BrokerError

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_APPLICATION_SIZES: Final = """
SELECT name, (SELECT sum(pg_total_relation_size(relid))::bigint
              FROM (SELECT relid FROM pg_partition_tree(name::regclass) UNION SELECT name::regclass) AS part)
FROM unnest(%s::text[]) AS name
WHERE to_regclass(name) IS NOT NULL
"""

_collector: BrokerCollector | None = None


def answer() -> tuple[str, bytes]:
    """Return all metrics, for a worker to serve."""
    return CONTENT_TYPE, render()


def render() -> bytes:
    """Return all metrics in Prometheus's format: the metrics of the broker and the metrics of this process.

    If PROMETHEUS_MULTIPROC_DIR is set, the result has the metrics of all processes that share this directory.
    """
    global _collector
    _collector = _collector or BrokerCollector(state)
    registry = CollectorRegistry()
    registry.register(_collector)
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
    return generate_latest(REGISTRY) + generate_latest(registry)


def state() -> ScrapeState:
    """Return the present state of the broker's tables, for the metrics."""
    if (observer := known_conditions.observer()) is not None:
        verdict, figures = observer.look()
        families = [] if figures is None else list(observer.metric_families(figures))
        return ScrapeState(verdict, judged=tuple(observer.CONDITIONS), families=families)
    judged = tuple(known_conditions.catalogue())
    try:
        with asking() as run:
            found = survey_project(run)
            if found.state is None:
                return ScrapeState(found.verdict, judged=judged)
            with lock_limited(run.connection):
                return ScrapeState(
                    found.verdict,
                    overview(run, found.state.summary),
                    found.state.summary,
                    audit.last(run),
                    found.state.once(table_sizes) | _application_sizes(),
                    of_parts=[one for module in hooks.metrics for one in import_module(module).figures(found.state)],
                    judged=judged,
                )
    except BrokerError as error:
        return ScrapeState(unusable(error), judged=judged)


def _application_sizes() -> dict[str, Any]:
    """Return the sizes of the ledger tables, inbox tables and pruned tables of parts that are on PostgreSQL."""
    sizes: dict[str, Any] = {}
    names = ["outbox_ledger", "outbox_inbox", *hooks.prunings]
    for alias in ledger_aliases():
        if connections[alias].vendor != "postgresql":
            continue
        try:
            with connections[alias].cursor() as cursor:
                cursor.execute(_APPLICATION_SIZES, [names])
                sizes |= {f"{alias}.{name}": size for name, size in cursor.fetchall()}
        except DatabaseError:
            continue
    return sizes
