"""Metrics from the broker's tables at scrape time: conditions, lag, undecided messages, dead letters, last audit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from outbox import hooks
from outbox.broker.operations.audit import Audit
from outbox.broker.operations.conditions import ConditionReport
from outbox.broker.operations.summary import GroupProgress, Overview, Summary
from outbox.contrib.prometheus.recorder import OTHERS

# At most this many pairs of group and topic have their own series: the first pairs in the order of their names. All
# other pairs share one series per group.
MOST_PAIRS: Final = 1000
_KEPT_SECONDS: Final = 5.0

# The values of the labels, and the value.
Rows = Sequence[tuple[Sequence[str], float]]
Figure = tuple[str, Rows]

_GROUP: Final = ("group",)
_PAIR: Final = ("group", "topic")
_PRODUCER: Final = ("producer_group",)
_TOPIC: Final = ("topic",)
_DATABASE: Final = ("database",)
# Name -> labels and text.
_GAUGES: Final[Mapping[str, tuple[Sequence[str], str]]] = {
    "outbox_condition": (
        ("name",),
        "0: the condition does not hold, 1: warning, 2: critical; no sample while this is unknown.",
    ),
    "outbox_leader": ((), "1 if a leader sequences messages, else 0."),
    "outbox_last_tick_age_seconds": ((), "Seconds since the last tick."),
    "outbox_counted_age_seconds": ((), "Seconds since lag and other figures were counted."),
    "outbox_lag_messages": (_PAIR, "Messages in the queues that the group has not finished."),
    "outbox_lag_seconds": (_PAIR, "Age of the oldest unfinished message; no sample if it is unknown."),
    "outbox_dead_letters": (_GROUP, "Unsettled dead letters."),
    "outbox_claimed_messages": (_GROUP, "Messages that have left their queue while their handler runs."),
    "outbox_retrying_messages": (_GROUP, "Messages that wait for another attempt."),
    "outbox_consumers": (_GROUP, "Live consumer processes."),
    "outbox_undecided_transactions": (_PRODUCER, "Undecided transactions."),
    "outbox_undecided_age_seconds": (_PRODUCER, "Age of the oldest undecided transaction."),
    "outbox_parked_transactions": (_PRODUCER, "Parked transactions: undecided past the limits of check-back."),
    "outbox_held_messages": (_TOPIC, "Decided messages that wait for an earlier undecided message of their key."),
    "outbox_audit_differences": ((), "Equations of the last audit that do not hold."),
    "outbox_audit_age_seconds": ((), "Seconds since the last audit."),
    "outbox_audit_messages": (("scope", "name", "term"), "A term of an equation of the last audit."),
    "outbox_table_bytes": (("table",), "Size of the table on disk, with its indexes."),
    "outbox_relay_messages": (_DATABASE, "Messages that wait for the relay."),
    "outbox_relay_age_seconds": (_DATABASE, "Age of the oldest message that waits for the relay."),
    "outbox_relay_parked_messages": (_DATABASE, "Messages of the relay that RocketMQ has rejected."),
}
# Totals since the start of a group or topic; their names end with `_total`.
_COUNTERS: Final[Mapping[str, tuple[Sequence[str], str]]] = {
    "outbox_queued_messages": (_TOPIC, "Messages put into the topic's queues."),
    "outbox_handled_messages": (_PAIR, "Messages that the group has handled."),
    "outbox_filtered_messages": (_PAIR, "Messages that do not match the group's filter."),
    "outbox_skipped_messages": (
        _PAIR,
        "Messages that were delivered again after the group had handled them; they also count as handled.",
    ),
    "outbox_sent_back_messages": (_PAIR, "Messages sent back for another attempt."),
    "outbox_dead_messages": (_PAIR, "Messages given up: dead letters, and messages whose time limit was over."),
    "outbox_expired_messages": (_PAIR, "Messages that retention removed before the group handled them."),
    "outbox_timed_out_messages": (
        _GROUP,
        "Messages that the group did not handle, because their time limit was over.",
    ),
}


@dataclass(frozen=True, slots=True)
class ScrapeState:
    """The figures of a scrape. If the broker cannot be reached, a scrape has only the verdict."""

    verdict: ConditionReport
    overview: Overview | None = None
    summary: Summary | None = None
    audit: Audit | None = None
    # The size of each table in bytes: the tables of the broker, and the application's ledger and inbox.
    sizes: Mapping[str, int] = field(default_factory=dict)
    # The figures of parts (`hooks.add_metrics`).
    of_parts: Sequence[Figure] = ()
    # The conditions of which this engine knows whether they hold.
    judged: Collection[str] = ()
    # The figures of an engine that are not in a summary.
    families: Sequence[Figure] = ()


class BrokerCollector:
    """Collects the metrics.

    Even if Prometheus scrapes more often, the collector reads the tables at most every five seconds.
    """

    def __init__(self, look: Callable[[], ScrapeState], registry: CollectorRegistry | None = None) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._kept: tuple[float, ScrapeState] | None = None
        if registry is not None:
            registry.register(self)

    def describe(self) -> Sequence[Metric]:
        """Return no metrics, because registering the collector must not query the broker."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of this scrape."""
        for name, rows in _figures(self._state()):
            family: GaugeMetricFamily | CounterMetricFamily
            if name in _COUNTERS:
                labels, text = _COUNTERS[name]
                family = CounterMetricFamily(name, text, labels=labels)
            else:
                labels, text = _GAUGES.get(name) or _gauges_of_parts()[name]
                family = GaugeMetricFamily(name, text, labels=labels)
            for values, value in rows:
                family.add_metric(values, value)
            yield family

    def _state(self) -> ScrapeState:
        with self._lock:
            now = time.monotonic()
            if self._kept is None or now - self._kept[0] > _KEPT_SECONDS:
                self._kept = (now, self._look())
            return self._kept[1]


def _gauges_of_parts() -> Mapping[str, tuple[Sequence[str], str]]:
    return {name: one for module in hooks.metrics for name, one in import_module(module).METRICS.items()}


def _figures(state: ScrapeState) -> Iterator[Figure]:
    yield _conditions(state)
    if state.overview is not None:
        yield from _broker(state.overview)
    if state.summary is not None:
        yield from _pairs(state.summary)
        yield from _groups(state.summary)
        yield from _producers(state.summary)
        yield from _topics(state.summary)
    yield from ((name, rows[:MOST_PAIRS]) for name, rows in state.families)
    if state.families:
        return
    if state.audit is not None:
        yield from _audit(state.audit)
    yield "outbox_table_bytes", [([table], size) for table, size in state.sizes.items()]
    yield from ((name, rows[:MOST_PAIRS]) for name, rows in state.of_parts)


def _conditions(state: ScrapeState) -> Figure:
    # A condition whose state is unknown has no sample. A sample 0 would resolve the alert while the broker is
    # unreachable.
    unknown = {condition.name for condition in state.verdict.conditions if condition.is_unknown}
    held = {one.name: int(one.severity) for one in state.verdict.conditions if not one.is_unknown}
    known = [name for name in (state.judged if state.verdict.is_complete else held) if name not in unknown]
    return "outbox_condition", [([name], held.get(name, 0)) for name in known]


def _broker(broker: Overview) -> Iterator[Figure]:
    yield "outbox_leader", [([], float(broker.leader is not None))]
    yield "outbox_last_tick_age_seconds", [([], broker.last_tick_seconds_ago)]
    yield "outbox_counted_age_seconds", [([], broker.counted_seconds_ago)]
    yield "outbox_consumers", [([group.name], group.consumers) for group in broker.groups]


def _pairs(summary: Summary) -> Iterator[Figure]:
    """Return the metrics per group and topic. The retry queues of a group are a topic of their own in these metrics."""
    pairs: dict[tuple[str, str], list[GroupProgress]] = {}
    for one in sorted(summary.groups, key=lambda one: (one.group, one.topic)):
        pair = (one.group, one.topic) if len(pairs) < MOST_PAIRS else (one.group, OTHERS)
        pairs.setdefault(pair, []).append(one)
    ages = [(pair, age) for pair, of in pairs.items() if (age := _lag_seconds(summary, of)) is not None]
    yield "outbox_lag_seconds", ages
    for name in ("lag", "handled", "filtered", "skipped", "sent_back", "dead", "expired"):
        yield f"outbox_{name}_messages", [(p, sum(getattr(one, name) for one in of)) for p, of in pairs.items()]


def _lag_seconds(summary: Summary, of: Sequence[GroupProgress]) -> float | None:
    """Return the age of the oldest waiting message in seconds.

    Return 0.0 if no message waits, and None if the age is unknown.
    """
    known = [age for one in of if (age := summary.seconds_since(one.oldest_at)) is not None]
    return max(known) if known else None if any(one.lag for one in of) else 0.0


def _groups(summary: Summary) -> Iterator[Figure]:
    yield "outbox_dead_letters", [([one.group], one.dead) for one in summary.rests]
    yield "outbox_claimed_messages", [([one.group], one.claimed) for one in summary.rests]
    yield "outbox_retrying_messages", [([one.group], one.retrying) for one in summary.rests]
    yield "outbox_timed_out_messages", [([one.group], one.timed_out) for one in summary.rests]


def _producers(summary: Summary) -> Iterator[Figure]:
    rows = summary.producers
    yield "outbox_undecided_transactions", [([one.group], one.undecided) for one in rows]
    yield "outbox_parked_transactions", [([one.group], one.parked) for one in rows]
    ages = [([one.group], age) for one in rows if (age := summary.seconds_since(one.oldest_at)) is not None]
    yield "outbox_undecided_age_seconds", ages


def _topics(summary: Summary) -> Iterator[Figure]:
    queued: dict[str, int] = {}
    held: dict[str, int] = {}
    for one in sorted(summary.topics, key=lambda one: one.topic):
        topic = one.topic if len(queued) < MOST_PAIRS else OTHERS
        queued[topic] = queued.get(topic, 0) + one.queued
        held[topic] = held.get(topic, 0) + one.held
    yield "outbox_queued_messages", [([topic], count) for topic, count in queued.items()]
    yield "outbox_held_messages", [([topic], count) for topic, count in held.items()]


def _audit(audit: Audit) -> Iterator[Figure]:
    yield "outbox_audit_differences", [([], len(audit.differences))]
    yield "outbox_audit_age_seconds", [([], audit.age_seconds)]
    terms: dict[tuple[str, str, str], float] = {}
    for scope in ("topics", "groups"):
        for number, (name, counted) in enumerate(sorted(audit.facts[scope].items())):
            for term, value in counted.items():
                series = (scope, name if number < MOST_PAIRS else OTHERS, term)
                terms[series] = terms.get(series, 0.0) + float(value)
    yield "outbox_audit_messages", list(terms.items())
