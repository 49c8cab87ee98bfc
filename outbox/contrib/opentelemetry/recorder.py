"""Metrics of messages, named and described by OpenTelemetry's semantic conventions for messaging.

The figures of one call are recorded at once, after the call. The instruments come from the global meter of the API,
which does nothing until a provider is set: applications set it late, for example after a fork.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from opentelemetry.metrics import MeterProvider, get_meter

from outbox.contrib.opentelemetry.tracer import SYSTEM
from outbox.transaction import CheckCounts
from outbox.utils.safe_text import class_path

# The version of the semantic conventions that defines the names, units, attributes and buckets of this module.
CONVENTIONS: Final = "1.44.0"
SCHEMA_URL: Final = f"https://opentelemetry.io/schemas/{CONVENTIONS}"
# In one process at most this many topics, and at most this many pairs of group and topic, have their own series. All
# other topics share one series. All other pairs share one series too.
MOST_SERIES: Final = 200
OTHERS: Final = "(others)"
_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)

Attributes = Mapping[str, str]

_SEND: Final[Attributes] = {
    "messaging.system": SYSTEM,
    "messaging.operation.name": "publish",
    "messaging.operation.type": "send",
}
_PROCESS: Final[Attributes] = {
    "messaging.system": SYSTEM,
    "messaging.operation.name": "process",
    "messaging.operation.type": "process",
}


class OpenTelemetryRecorder:
    """Implements outbox.utils.measures.Recorder.

    Without `provider` the recorder uses the global meter provider, even if the application sets the global provider
    later. Without any provider, the instruments of OpenTelemetry's API do nothing.
    """

    def __init__(self, provider: MeterProvider | None = None) -> None:
        meter = get_meter("outbox", meter_provider=provider, schema_url=SCHEMA_URL)
        self._sent = meter.create_counter(
            "messaging.client.sent.messages",
            unit="{message}",
            description="Number of messages producer attempted to send to the broker.",
        )
        self._operation = meter.create_histogram(
            "messaging.client.operation.duration",
            unit="s",
            description="Duration of messaging operation initiated by a producer or consumer client.",
            explicit_bucket_boundaries_advisory=_BUCKETS,
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages",
            unit="{message}",
            description="Number of messages that were delivered to the application.",
        )
        self._process = meter.create_histogram(
            "messaging.process.duration",
            unit="s",
            description="Duration of processing operation.",
            explicit_bucket_boundaries_advisory=_BUCKETS,
        )
        # Keep the attributes, because making them for each call costs more than finding them.
        self._topics: dict[str, Attributes] = {}
        self._pairs: dict[tuple[str, str], Attributes] = {}
        self._lock = threading.Lock()

    def published(self, topics: Sequence[str], path: str, seconds: float) -> None:
        self._published(topics, seconds, {})

    def publish_failed(self, topics: Sequence[str], seconds: float, error: BaseException) -> None:
        self._published(topics, seconds, {"error.type": class_path(error)})

    def handled(
        self, group: str, topic: str, waited: list[float], seconds: float, *, count: int, failures: Sequence[object]
    ) -> None:
        about = self._pairs.get((group, topic)) or self._pair(group, topic)
        self._consumed.add(count, about)
        self._process.record(seconds, {**about, "error.type": class_path(failures[0])} if failures else about)

    def ticked(self, seconds: float, appended: int) -> None:
        """Record nothing: the conventions have no metric for the work of a broker."""

    def checked(self, producer_group: str, counts: CheckCounts) -> None:
        """Record nothing: the conventions have no metric for check-back."""

    def _published(self, topics: Sequence[str], seconds: float, error: Attributes) -> None:
        different = set(topics)
        for topic in different:
            about = self._topics.get(topic) or self._topic(topic)
            self._sent.add(topics.count(topic), {**about, **error} if error else about)
        whole = (self._topics.get(topics[0]) or self._topic(topics[0])) if len(different) == 1 else _SEND
        self._operation.record(seconds, {**whole, **error} if error else whole)

    def _topic(self, topic: str) -> Attributes:
        with self._lock:
            name = topic if len(self._topics) < MOST_SERIES else OTHERS
            return self._topics.setdefault(name, {**_SEND, "messaging.destination.name": name})

    def _pair(self, group: str, topic: str) -> Attributes:
        with self._lock:
            pair = (group, topic) if len(self._pairs) < MOST_SERIES else (OTHERS, OTHERS)
            about = {**_PROCESS, "messaging.consumer.group.name": pair[0], "messaging.destination.name": pair[1]}
            return self._pairs.setdefault(pair, about)


@cache
def of_this_process() -> OpenTelemetryRecorder:
    """Return the recorder of the global meter provider."""
    return OpenTelemetryRecorder()
