"""The metrics that a process records about its own work.

For several processes use prometheus_client's multi-process mode.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from outbox.transaction import CheckCounts

# In one process at most this many topics, and at most this many pairs of group and topic, have their own series. All
# other topics share one series. All other pairs share one series too.
MOST_TOPICS: Final = 200
MOST_PAIRS: Final = 200
OTHERS: Final = "(others)"
# From each batch, the histograms record the waiting times of only about this many messages, so that the cost per
# message stays small.
_SAMPLES: Final = 10
_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0)


@dataclass(frozen=True, slots=True)
class _Place:
    """The metrics of one subscription."""

    handler: Histogram
    start: Histogram
    end: Histogram
    failed: Counter


class PrometheusRecorder:
    """Implements outbox.utils.measures.Recorder."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._topics: set[str] = set()
        self._lock = threading.Lock()
        self._published = Counter(
            "outbox_published_messages", "Messages that this process published.", ["topic", "path"], registry=registry
        )
        self._publish = Histogram(
            "outbox_publish_seconds", "Duration of one publish call.", ["path"], buckets=_BUCKETS, registry=registry
        )
        self._start = Histogram(
            "outbox_delivery_start_seconds",
            "Seconds from publishing (or the due time) to the first call of the handler.",
            ["group", "topic"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._end = Histogram(
            "outbox_delivery_seconds",
            "Seconds from publishing (or the due time) to the end of the first call of the handler.",
            ["group", "topic"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._handler = Histogram(
            "outbox_handler_seconds",
            "Duration of one handler call.",
            ["group", "topic"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._failed = Counter("outbox_failed_attempts", "Attempts that failed.", ["group", "topic"], registry=registry)
        self._tick = Histogram(
            "outbox_tick_seconds", "Duration of one tick that found work.", buckets=_BUCKETS, registry=registry
        )
        self._sequenced = Counter(
            "outbox_sequenced_messages", "Messages that this process appended to queues.", registry=registry
        )
        self._checks = Counter(
            "outbox_checks", "Check-backs by answer.", ["producer_group", "answer"], registry=registry
        )

        # Keep the labelled metrics, because finding a metric by its labels costs more than adding to it.
        self._paths: dict[str, Histogram] = {}
        self._sent: dict[tuple[str, str], Counter] = {}
        self._places: dict[tuple[str, str], _Place] = {}

    def published(self, topics: Sequence[str], path: str, seconds: float) -> None:
        publish = self._paths.get(path)
        if publish is None:
            publish = self._paths[path] = self._publish.labels(path)
        publish.observe(seconds)
        for topic in set(topics):
            sent = self._sent.get((topic, path))
            if sent is None:
                sent = self._published.labels(self._bounded(topic), path)
                if topic in self._topics:
                    self._sent[topic, path] = sent
            sent.inc(topics.count(topic))

    def publish_failed(self, topics: Sequence[str], seconds: float, error: BaseException) -> None:
        """Record nothing: the metrics of publishing count the calls that stored messages."""

    def handled(
        self, group: str, topic: str, waited: list[float], seconds: float, *, count: int, failures: Sequence[object]
    ) -> None:
        place = self._places.get((group, topic)) or self._place(group, topic)
        place.handler.observe(seconds)
        if failures:
            place.failed.inc(len(failures))
        start, end = place.start, place.end
        for wait in waited[:: max(1, len(waited) // _SAMPLES)]:
            start.observe(wait)
            end.observe(wait + seconds)

    def ticked(self, seconds: float, appended: int) -> None:
        self._tick.observe(seconds)
        self._sequenced.inc(appended)

    def checked(self, producer_group: str, counts: CheckCounts) -> None:
        answers = {"commit": counts.committed, "rollback": counts.rolled_back, "unknown": counts.unknown}
        for answer, count in answers.items():
            self._checks.labels(producer_group, answer).inc(count)

    def _place(self, group: str, topic: str) -> _Place:
        """Return the metrics of a subscription.

        After MOST_PAIRS subscriptions, all further subscriptions share the metrics with the label (others).
        """
        with self._lock:
            pair = (group, topic) if len(self._places) < MOST_PAIRS else (OTHERS, OTHERS)
            if pair not in self._places:
                self._places[pair] = _Place(
                    handler=self._handler.labels(*pair),
                    start=self._start.labels(*pair),
                    end=self._end.labels(*pair),
                    failed=self._failed.labels(*pair),
                )
            return self._places[pair]

    def _bounded(self, topic: str) -> str:
        if topic in self._topics:
            return topic
        with self._lock:
            if len(self._topics) >= MOST_TOPICS:
                return OTHERS
            self._topics.add(topic)
        return topic


@cache
def of_this_process() -> PrometheusRecorder:
    """Return the recorder of prometheus_client's default registry, which can have only one."""
    return PrometheusRecorder(REGISTRY)
