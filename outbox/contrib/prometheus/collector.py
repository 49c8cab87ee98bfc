"""Metrics from the broker's tables at scrape time: conditions, lag, undecided messages, dead letters, last audit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from outbox.broker.operations.audit import Audit
from outbox.broker.operations.conditions import CATALOGUE, ConditionReport
from outbox.broker.operations.limits import SubscriptionLimits
from outbox.broker.operations.summary import GroupProgress, Overview, Summary
from outbox.contrib.prometheus.recorder import OTHERS

# At most this many pairs of group and topic have their own series: the first pairs in the order of their names. All
# other pairs share one series per group.
MOST_PAIRS: Final = 1000
_KEPT_SECONDS: Final = 5.0
# The texts of the families that two engines have.
_TEXTS: Final[Mapping[str, str]] = {
    "outbox_lag_messages": "Messages that are queued and not finished.",
    "outbox_lag_seconds": "Age of the oldest unfinished message; no sample if it is unknown.",
    "outbox_dead_letters": "Unsettled dead letters.",
    "outbox_retrying_messages": "Messages that wait for another attempt.",
    "outbox_undecided_transactions": "Undecided transactions.",
    "outbox_undecided_age_seconds": "Age of the oldest undecided transaction.",
    "outbox_parked_transactions": "Parked transactions: undecided past the limits of check-back.",
    "outbox_queued_messages": "Messages put into the topic's queues.",
    "outbox_relay_messages": "Messages that wait for the relay.",
    "outbox_relay_age_seconds": "Age of the oldest message that waits for the relay.",
    "outbox_relay_parked_messages": "Messages of the relay that RocketMQ has rejected.",
}
_COUNTERS: Final = frozenset(("outbox_queued_messages",))


@dataclass(frozen=True, slots=True)
class ScrapeState:
    """The figures of a scrape. If the broker cannot be reached, a scrape has only the verdict."""

    verdict: ConditionReport
    overview: Overview | None = None
    summary: Summary | None = None
    audit: Audit | None = None
    # The size of each table in bytes: the tables of the broker, and the application's ledger and inbox.
    sizes: Mapping[str, int] = field(default_factory=dict)
    # How late each schedule is, by producer group and name (seconds).
    schedules: Mapping[tuple[str, str], float] = field(default_factory=dict)
    limits: Sequence[SubscriptionLimits] = ()
    # The conditions of which this engine knows whether they hold.
    judged: Collection[str] = tuple(CATALOGUE)
    # The families of an engine whose figures are not in a summary: name, labels, rows (values of the labels, value).
    families: Sequence[tuple[str, Sequence[str], Sequence[tuple[Sequence[str], float]]]] = ()


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
        state = self._state()
        yield from _conditions(state)
        if state.overview is not None:
            yield from _broker(state.overview)
        if state.summary is not None:
            yield from _pairs(state.summary)
            yield from _groups(state)
            yield from _producers(state.summary)
            yield from _topics(state.summary)
        for name, labels, rows in state.families:
            yield _shared(name, labels, rows[:MOST_PAIRS])
        if state.families:
            return
        yield from _limits(state.limits[:MOST_PAIRS])
        if state.audit is not None:
            yield from _audit(state.audit)
        yield _family(
            "outbox_table_bytes",
            "Size of the table on disk, with its indexes.",
            ["table"],
            [([t], b) for t, b in state.sizes.items()],
        )
        yield _family(
            "outbox_schedule_late_seconds",
            "Seconds since the first due moment without a message; 0 while no due moment has passed.",
            ["producer_group", "schedule"],
            list(state.schedules.items()),
        )

    def _state(self) -> ScrapeState:
        with self._lock:
            now = time.monotonic()
            if self._kept is None or now - self._kept[0] > _KEPT_SECONDS:
                self._kept = (now, self._look())
            return self._kept[1]


def _family(name: str, text: str, labels: Sequence[str], rows: Sequence[tuple[Sequence[str], float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _total(name: str, text: str, labels: Sequence[str], rows: Sequence[tuple[Sequence[str], float]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _shared(name: str, labels: Sequence[str], rows: Sequence[tuple[Sequence[str], float]]) -> Metric:
    """Return a family that two engines have."""
    family = _total if name in _COUNTERS else _family
    return family(name, _TEXTS[name], labels, rows)


def _conditions(state: ScrapeState) -> Iterator[Metric]:
    # A condition whose state is unknown has no sample. A sample 0 would resolve the alert while the broker is
    # unreachable.
    unknown = {condition.name for condition in state.verdict.conditions if condition.is_unknown}
    held = {one.name: int(one.severity) for one in state.verdict.conditions if not one.is_unknown}
    known = [name for name in (state.judged if state.verdict.is_complete else held) if name not in unknown]
    rows = [([name], held.get(name, 0)) for name in known]
    text = "0: the condition does not hold, 1: warning, 2: critical; no sample while it is unknown."
    yield _family("outbox_condition", text, ["name"], rows)


def _broker(broker: Overview) -> Iterator[Metric]:
    yield _family(
        "outbox_leader", "1 if a leader sequences messages, else 0.", [], [([], float(broker.leader is not None))]
    )
    yield _family(
        "outbox_last_tick_age_seconds", "Seconds since the last tick.", [], [([], broker.last_tick_seconds_ago)]
    )
    yield _family(
        "outbox_counted_age_seconds",
        "Seconds since lag and other figures were counted.",
        [],
        [([], broker.counted_seconds_ago)],
    )


def _pairs(summary: Summary) -> Iterator[Metric]:
    """Return the metrics per group and topic. The retry queues of a group are a topic of their own in these metrics."""
    pairs: dict[tuple[str, str], list[GroupProgress]] = {}
    for one in sorted(summary.groups, key=lambda one: (one.group, one.topic)):
        pair = (one.group, one.topic) if len(pairs) < MOST_PAIRS else (one.group, OTHERS)
        pairs.setdefault(pair, []).append(one)
    labels = ["group", "topic"]
    yield _shared(
        "outbox_lag_messages",
        labels,
        [(p, sum(o.lag for o in of)) for p, of in pairs.items()],
    )
    ages = [(pair, age) for pair, of in pairs.items() if (age := _lag_seconds(summary, of)) is not None]
    yield _shared("outbox_lag_seconds", labels, ages)
    for name, text in (
        ("handled", "Messages that the group has done."),
        ("filtered", "Messages that do not match the group's filter."),
        ("skipped", "Messages delivered again after the group had done them; they count as handled, too."),
        ("sent_back", "Messages sent back for another attempt."),
        ("dead", "Messages given up: dead letters, and messages whose time limit was over."),
        ("expired", "Messages that retention removed before the group handled them."),
    ):
        rows = [(p, sum(getattr(o, name) for o in of)) for p, of in pairs.items()]
        yield _total(f"outbox_{name}_messages", text, labels, rows)


def _lag_seconds(summary: Summary, of: Sequence[GroupProgress]) -> float | None:
    """Return the age of the oldest waiting message in seconds.

    Return 0.0 if no message waits, and None if the age is unknown.
    """
    known = [age for one in of if (age := summary.seconds_since(one.oldest_at)) is not None]
    return max(known) if known else None if any(one.lag for one in of) else 0.0


def _groups(state: ScrapeState) -> Iterator[Metric]:
    assert state.summary is not None
    rests = state.summary.rests
    yield _shared("outbox_dead_letters", ["group"], [([r.group], r.dead) for r in rests])
    yield _family(
        "outbox_claimed_messages",
        "Messages that have left their queue while their handler runs.",
        ["group"],
        [([r.group], r.claimed) for r in rests],
    )
    yield _shared(
        "outbox_retrying_messages",
        ["group"],
        [([r.group], r.retrying) for r in rests],
    )
    yield _total(
        "outbox_timed_out_messages",
        "Messages that the group did not handle, because their time limit was over.",
        ["group"],
        [([r.group], r.timed_out) for r in rests],
    )
    if state.overview is not None:
        rows = [([g.name], g.consumers) for g in state.overview.groups]
        yield _family("outbox_consumers", "Live consumer processes.", ["group"], rows)


def _limits(found: Sequence[SubscriptionLimits]) -> Iterator[Metric]:
    pair = ["group", "topic"]
    values = [
        ([one.group, one.topic, name], float(value))
        for one in found
        for name in ("running", "per_key", "per_second")
        if (value := getattr(one.limits, name)) is not None
    ]
    yield _family("outbox_limit", "The limit of a subscription for all workers together.", [*pair, "limit"], values)
    yield _family(
        "outbox_limit_in_use",
        "Handler calls of a limited subscription that run now.",
        pair,
        [([one.group, one.topic], one.in_use) for one in found],
    )
    yield _family(
        "outbox_limit_waiting_messages",
        "Fetched messages that wait for a limit of their subscription.",
        pair,
        [([one.group, one.topic], one.waiting) for one in found],
    )


def _producers(summary: Summary) -> Iterator[Metric]:
    label = ["producer_group"]
    rows = summary.producers
    yield _shared(
        "outbox_undecided_transactions",
        label,
        [([r.group], r.undecided) for r in rows],
    )
    yield _shared(
        "outbox_parked_transactions",
        label,
        [([r.group], r.parked) for r in rows],
    )
    ages = [([r.group], age) for r in rows if (age := summary.seconds_since(r.oldest_at)) is not None]
    yield _shared("outbox_undecided_age_seconds", label, ages)


def _topics(summary: Summary) -> Iterator[Metric]:
    queued: dict[str, int] = {}
    held: dict[str, int] = {}
    for one in sorted(summary.topics, key=lambda one: one.topic):
        topic = one.topic if len(queued) < MOST_PAIRS else OTHERS
        queued[topic] = queued.get(topic, 0) + one.queued
        held[topic] = held.get(topic, 0) + one.held
    yield _shared(
        "outbox_queued_messages",
        ["topic"],
        [([t], n) for t, n in queued.items()],
    )
    yield _family(
        "outbox_held_messages",
        "Decided messages that wait for an earlier undecided message of their key.",
        ["topic"],
        [([t], n) for t, n in held.items()],
    )


def _audit(audit: Audit) -> Iterator[Metric]:
    yield _family(
        "outbox_audit_differences", "Equations of the last audit that do not hold.", [], [([], len(audit.differences))]
    )
    yield _family("outbox_audit_age_seconds", "Seconds since the last audit.", [], [([], audit.age_seconds)])
    terms: dict[tuple[str, str, str], float] = {}
    for scope in ("topics", "groups"):
        for number, (name, counted) in enumerate(sorted(audit.facts[scope].items())):
            for term, value in counted.items():
                series = (scope, name if number < MOST_PAIRS else OTHERS, term)
                terms[series] = terms.get(series, 0.0) + float(value)
    labels = ["scope", "name", "term"]
    yield _family("outbox_audit_messages", "A term of conservation, as last audited.", labels, list(terms.items()))
