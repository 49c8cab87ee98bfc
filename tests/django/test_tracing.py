"""Traces: one from the web request over half, decision and check-back to every handler; nothing when it is off."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

from outbox import Delivery, RetryPolicy, tracing
from outbox.contrib.django import message, publish, publish_many, publish_messages, run_check_back, subscriber
from outbox.contrib.django.testing import in_memory_outbox
from outbox.contrib.opentelemetry.tracer import OpenTelemetryTracer
from tests.django.processes import ROOT, environment, process
from tests.django.shop.models import Effect
from tests.django.state import decisions, rolled_back
from tests.django.support import consume
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("empty_log", "no_subscribers")


class Spans:
    """The spans of this process."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.web = self.provider.get_tracer("web")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


@pytest.fixture
def spans() -> Iterator[Spans]:
    """This process follows its messages."""
    found = Spans()
    tracing.install(OpenTelemetryTracer(found.provider))
    yield found
    tracing.install(None)


def context(span: ReadableSpan) -> SpanContext:
    found = span.get_span_context()
    assert found is not None
    return found


def is_below(child: ReadableSpan, parent: ReadableSpan) -> bool:
    above, wanted = child.parent, context(parent)
    return above is not None and (above.trace_id, above.span_id) == (wanted.trace_id, wanted.span_id)


def test_request_publish_and_handlers_are_one_trace(path: str, spans: Spans) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        # Copied headers do not lead back: a message that is published here is below this call.
        publish("payments", {}, key=delivery.key, headers=delivery.headers)

    @subscriber("payments", group="points")
    def pay(delivery: Delivery) -> None:
        Effect.objects.create(number=delivery.key)

    with spans.web.start_as_current_span("POST /orders"), transaction.atomic():
        receipt = publish("orders", {}, key="o1")
    for _ in range(2):
        consume()
    assert Effect.objects.count() == 1
    request, published, processed = (spans.one(name) for name in ("POST /orders", "publish orders", "process orders"))
    assert is_below(published, request)
    assert is_below(processed, published)
    assert is_below(spans.one("publish payments"), processed)
    assert is_below(spans.one("process payments"), spans.one("publish payments"))
    assert (published.kind, processed.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    common = {
        "messaging.system": "outbox",
        "messaging.destination.name": "orders",
        "messaging.message.id": str(receipt.message_id),
        "messaging.message.body.size": 2,
        "messaging.outbox.message.key": "o1",
    }
    assert dict(published.attributes or {}) == {
        **common,
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
    }
    [queue] = {str((processed.attributes or {})["messaging.destination.partition.id"])}
    assert queue.startswith("orders/")
    assert dict(processed.attributes or {}) == {
        **common,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": "effects",
        "messaging.destination.partition.id": queue,
        "messaging.outbox.delivery.attempt": 1,
    }
    if path == "two_phase":
        assert is_below(spans.one("commit orders"), published)


def test_the_decision_of_check_back_is_in_the_trace(spans: Spans) -> None:
    with spans.web.start_as_current_span("POST /orders"), transaction.atomic():
        publish("orders", {}, key="kept")
        connections["default"].run_on_commit.clear()
    with spans.web.start_as_current_span("another"), rolled_back():
        publish("payments", {}, key="dropped")
    assert spans.named("commit orders") == []
    run_check_back()
    assert decisions() == {"kept": "C", "dropped": "R"}
    for topic, decision in (("orders", "COMMIT"), ("payments", "ROLLBACK")):
        found = spans.one(f"check_back {topic}")
        assert is_below(found, spans.one(f"publish {topic}"))
        attributes = found.attributes or {}
        assert attributes["messaging.outbox.decision"] == decision
        assert attributes["messaging.outbox.decision.status"] == "applied"
        assert "the ledger says" in str(attributes["messaging.outbox.check.detail"])
        assert found.start_time is not None
        assert found.end_time is not None
        assert found.start_time < found.end_time


def test_a_batch_is_linked_to_what_published_its_messages(spans: Spans) -> None:
    @subscriber("orders", group="effects", batch=10)
    def effect(deliveries: list[Delivery]) -> None:
        assert len(deliveries) == 5

    for number in range(2):
        with spans.web.start_as_current_span(f"request {number}"), transaction.atomic():
            publish("orders", {"number": number}, key="one queue")
    publish_many("orders", [{}, {}], key="one queue", at_once=True)
    tracing.install(None)
    publish("orders", {}, key="one queue", at_once=True)
    tracing.install(OpenTelemetryTracer(spans.provider))
    consume()
    batch = spans.one("process orders")
    assert batch.parent is None
    assert (batch.attributes or {})["messaging.batch.message_count"] == 5
    assert "messaging.message.id" not in (batch.attributes or {})
    published = {context(span).span_id for span in spans.named("publish orders")}
    assert len(published) == len(batch.links) == 3
    assert {link.context.span_id for link in batch.links} == published
    [many] = [
        span for span in spans.named("publish orders") if "messaging.batch.message_count" in (span.attributes or {})
    ]
    assert (many.attributes or {})["messaging.batch.message_count"] == 2


def test_every_attempt_is_a_span_and_failures_are_on_it(spans: Spans) -> None:
    @subscriber("orders", group="effects", retry=RetryPolicy(delays_seconds=[0]))
    def effect(delivery: Delivery) -> None:
        if delivery.attempt == 1:
            raise ValueError("not yet")

    publish("orders", {}, key="o1", at_once=True)
    for _ in range(2):
        consume()
    first, second = spans.named("process orders")
    assert is_below(first, spans.one("publish orders"))
    assert is_below(second, spans.one("publish orders"))
    assert (first.status.status_code, second.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)
    assert (first.attributes or {})["error.type"] == "builtins.ValueError"
    assert [event.name for event in first.events] == ["exception"]
    assert (second.attributes or {})["messaging.outbox.delivery.attempt"] == 2


def test_a_publish_that_fails_is_an_error_of_its_span(spans: Spans) -> None:
    with pytest.raises(Exception, match="nowhere"):
        publish("nowhere", {}, at_once=True)
    assert spans.one("publish nowhere").status.status_code is StatusCode.ERROR


def test_several_topics_in_one_transaction(spans: Spans) -> None:
    with transaction.atomic():
        publish_messages([message("orders", {}), message("payments", {})])
    published = spans.one("publish")
    assert "messaging.destination.name" not in (published.attributes or {})
    assert is_below(spans.one("commit"), published)


HOSTILE = [
    "",
    "00-00000000000000000000000000000000-0000000000000000-01",
    "00-zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz-zzzzzzzzzzzzzzzz-01",
    "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\nX-Evil: 1",
    "\u202e\x1b[2J" * 100,
    "0" * 4096,
]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_a_header_that_is_no_context_does_no_harm(value: str, spans: Spans) -> None:
    seen = []

    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        seen.append(delivery.headers["traceparent"])

    tracing.install(None)
    publish("orders", {}, headers={"traceparent": value, "tracestate": value, "baggage": value}, at_once=True)
    tracing.install(OpenTelemetryTracer(spans.provider))
    consume()
    assert seen == [value]
    assert spans.one("process orders").parent is None


def test_a_trace_of_another_service_continues(spans: Spans) -> None:
    publish(
        "orders", {}, headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}, at_once=True
    )
    with spans.web.start_as_current_span("POST /orders"):
        publish(
            "payments",
            {},
            headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
            at_once=True,
        )
    above = spans.one("publish orders").parent
    assert above is not None
    assert (above.trace_id, above.span_id) == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert is_below(spans.one("publish payments"), spans.one("POST /orders"))


def test_headers_of_the_application_stay_and_too_many_cost_the_trace_not_the_message(spans: Spans) -> None:
    seen = []

    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        seen.append(dict(delivery.headers))

    publish("orders", {}, key="a", headers={"tenant": "t1"}, at_once=True)
    full = {f"h{number}": "" for number in range(64)}
    publish("orders", {}, key="b", headers=full, at_once=True)
    consume()
    [usual] = [headers for headers in seen if "tenant" in headers]
    assert sorted(usual) == ["tenant", "traceparent"]
    assert full in seen


def test_tests_of_applications_see_the_same_trace(spans: Spans) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        pass

    with in_memory_outbox() as broker:
        publish("orders", {}, at_once=True)
        broker.drain()
    assert is_below(spans.one("process orders"), spans.one("publish orders"))


@pytest.mark.slow
def test_one_trace_through_the_processes_of_a_worker(
    spans: Spans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "spans.jsonl"
    monkeypatch.setenv("TEST_SPANS", str(file))
    monkeypatch.setenv("TEST_APPS", APP)

    def of_worker() -> dict[str, dict[str, Any]]:
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return {span["name"]: span for span in map(json.loads, lines)}

    with process(["-m", "django", "outbox_worker"], quiet=True):
        with spans.web.start_as_current_span("POST /orders"), transaction.atomic():
            publish("orders", {}, key="one")
            # The end gets lost: the worker asks the ledger.
            connections["default"].run_on_commit.clear()
        wanted = {"check_back orders", "process orders", "publish steps", "process steps"}
        eventually(lambda: wanted <= of_worker().keys(), within_seconds=90, what=lambda: str(of_worker().keys()))
    found = of_worker()
    published = context(spans.one("publish orders"))
    assert {found[name]["context"]["trace_id"] for name in wanted} == {f"0x{published.trace_id:032x}"}
    for name in ("check_back orders", "process orders"):
        assert found[name]["parent_id"] == f"0x{published.span_id:016x}"
    assert found["process steps"]["parent_id"] == found["publish steps"]["context"]["span_id"]


APP = "outbox.contrib.opentelemetry"
OFF = """
import sys, django
django.setup()
from django.db import transaction
from outbox.contrib.django import publish, run_check_back
from outbox.contrib.django.worker.drain import drain
from tests.django.sessions import broker_connection
with transaction.atomic():
    publish("orders", {}, key="one")
drain()
run_check_back()
with broker_connection() as (connection, _):
    headers = {row[0] for row in connection.execute("SELECT headers FROM outbox.commit_log")}
from tests.django.shop.models import Effect
from outbox.utils import measures
imported = [name for name in sys.modules if name.startswith("opentelemetry")]
print(Effect.objects.count(), headers, measures.recorder, imported)
"""


def test_off_imports_nothing_and_writes_no_header() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFF], env=environment(), cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout == "2 {None} None []\n"
