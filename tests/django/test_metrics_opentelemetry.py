"""Metrics by OpenTelemetry's conventions: names, values, the processes that record them, and no cost when off."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from django.db import transaction
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from opentelemetry.semconv.schemas import Schemas

from outbox import Delivery
from outbox.contrib.django import message, publish, publish_many, publish_messages, subscriber
from outbox.contrib.opentelemetry.recorder import MOST_SERIES, OTHERS, SCHEMA_URL, OpenTelemetryRecorder
from outbox.errors import BrokerUnavailable
from outbox.utils import measures
from tests.django.broker_world import away
from tests.django.processes import ROOT, environment, process
from tests.django.shop.models import Effect
from tests.django.support import consume
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("empty_log", "no_subscribers")

SEND: Final = {
    "messaging.system": "outbox",
    "messaging.operation.name": "publish",
    "messaging.operation.type": "send",
}
PROCESS: Final = {
    "messaging.system": "outbox",
    "messaging.operation.name": "process",
    "messaging.operation.type": "process",
}
Points = dict[str, list[tuple[dict[str, Any], int]]]


def points(exported: str) -> Points:
    """For each metric its attributes and values; the value of a histogram is its count."""
    found: Points = {}
    for resource in json.loads(exported)["resource_metrics"]:
        for scope in resource["scope_metrics"]:
            for metric in scope["metrics"]:
                found[metric["name"]] = [
                    (point["attributes"], point["count"] if "count" in point else point["value"])
                    for point in metric["data"]["data_points"]
                ]
    return found


class Figures:
    """What this process records."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.recorder = OpenTelemetryRecorder(MeterProvider([self.reader]))

    def points(self) -> Points:
        data = self.reader.get_metrics_data()
        assert data is not None
        return points(data.to_json())


@pytest.fixture
def figures() -> Iterator[Figures]:
    """This process records its figures."""
    found = Figures()
    measures.install(found.recorder)
    yield found
    measures.install()


def test_names_units_and_texts_are_those_of_the_pinned_conventions(figures: Figures) -> None:
    assert SCHEMA_URL in {schema.value for schema in Schemas}
    figures.recorder.published(["orders"], "direct", 0.001)
    figures.recorder.handled("effects", "orders", [], 0.001, count=1, failures=[])
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("conventions")
    messaging_metrics.create_messaging_client_sent_messages(meter).add(1)
    messaging_metrics.create_messaging_client_consumed_messages(meter).add(1)
    messaging_metrics.create_messaging_client_operation_duration(meter).record(1)
    messaging_metrics.create_messaging_process_duration(meter).record(1)

    def described(of: InMemoryMetricReader) -> tuple[str, list[tuple[str, str, str, str]]]:
        data = of.get_metrics_data()
        assert data is not None
        [scope] = data.resource_metrics[0].scope_metrics
        texts = [(one.name, one.unit or "", one.description or "", type(one.data).__name__) for one in scope.metrics]
        return scope.scope.schema_url or "", sorted(texts)

    schema, recorded = described(figures.reader)
    assert schema == SCHEMA_URL
    assert recorded == described(reader)[1]


def test_publish_calls_are_recorded_with_their_messages(path: str, figures: Figures) -> None:
    with transaction.atomic():
        publish("orders", {}, key="one")
        publish_many("orders", [{}, {}])
    with transaction.atomic():
        publish_messages([message("orders", {}), message("payments", {})])
    orders, payments = ({**SEND, "messaging.destination.name": topic} for topic in ("orders", "payments"))
    found = figures.points()
    assert sorted(found) == ["messaging.client.operation.duration", "messaging.client.sent.messages"]
    assert sorted(found["messaging.client.sent.messages"], key=str) == sorted([(orders, 4), (payments, 1)], key=str)
    # The call with two topics has no attribute for one destination.
    assert sorted(found["messaging.client.operation.duration"], key=str) == sorted([(orders, 2), (SEND, 1)], key=str)


def test_a_publish_call_that_fails_is_recorded_with_its_error(figures: Figures) -> None:
    with away("broker"), pytest.raises(BrokerUnavailable, match="cannot be reached"):
        publish("orders", {}, key="one", at_once=True)
    [(attributes, count)] = figures.points()["messaging.client.sent.messages"]
    assert count == 1
    assert attributes.pop("error.type").startswith("outbox.errors.")
    assert attributes == {**SEND, "messaging.destination.name": "orders"}


def test_handler_calls_are_recorded_once_per_call(figures: Figures) -> None:
    @subscriber("orders", group="effects", batch=10)
    def effect(deliveries: list[Delivery]) -> None: ...

    @subscriber("payments", group="points")
    def fail(delivery: Delivery) -> None:
        raise ValueError("not this one")

    publish_many("orders", [{}, {}, {}], key="one queue", at_once=True)
    publish("payments", {}, at_once=True)
    consume()
    effects = {**PROCESS, "messaging.consumer.group.name": "effects", "messaging.destination.name": "orders"}
    failed = {**PROCESS, "messaging.consumer.group.name": "points", "messaging.destination.name": "payments"}
    found = figures.points()
    by_group = sorted(found["messaging.client.consumed.messages"], key=str)
    assert by_group == sorted([(effects, 3), (failed, 1)], key=str)
    durations = sorted(found["messaging.process.duration"], key=str)
    assert durations == sorted([(effects, 1), ({**failed, "error.type": "builtins.ValueError"}, 1)], key=str)


def test_series_are_bounded(figures: Figures) -> None:
    for number in range(MOST_SERIES + 50):
        figures.recorder.published([f"topic-{number}"], "direct", 0.001)
        figures.recorder.handled("g", f"topic-{number}", [], 0.001, count=1, failures=[])
    found = figures.points()
    for name in ("messaging.client.sent.messages", "messaging.client.consumed.messages"):
        counts = {point["messaging.destination.name"]: count for point, count in found[name]}
        assert len(counts) == MOST_SERIES + 1
        assert counts[OTHERS] == 50


APPS = {"prometheus": "outbox.contrib.prometheus", "opentelemetry": "outbox.contrib.opentelemetry"}


def run(code: str, *apps: str, arguments: Iterable[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**environment(), "TEST_APPS": " ".join(APPS[name] for name in apps)},
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )


LATE = """
import django
django.setup()
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from outbox.contrib.django import publish
publish("orders", {}, key="before", at_once=True)
# As late as in a hook of a server that forks.
reader = InMemoryMetricReader()
set_meter_provider(MeterProvider([reader]))
publish("orders", {}, key="one", at_once=True)
print(reader.get_metrics_data().to_json(indent=None))
"""


def test_a_provider_that_is_set_late_gets_the_figures_from_then_on() -> None:
    done = run(LATE, "opentelemetry")
    assert done.returncode == 0, done.stderr
    orders = {**SEND, "messaging.destination.name": "orders"}
    assert points(done.stdout)["messaging.client.sent.messages"] == [(orders, 1)]


@pytest.mark.slow
def test_web_process_and_worker_record_their_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("TEST_METRICS", str(file))
    monkeypatch.setenv("TEST_APPS", APPS["opentelemetry"])

    def of_worker() -> Points:
        """The newest figures of all processes of the worker."""
        found: Points = {}
        for line in file.read_text().split("\n")[:-1] if file.exists() else []:
            found.update(points(line))
        return found

    steps = {**PROCESS, "messaging.consumer.group.name": "effects", "messaging.destination.name": "steps"}
    with process(["-m", "django", "outbox_worker"], quiet=True):
        monkeypatch.delenv("TEST_METRICS")
        done = run(LATE, "opentelemetry")
        assert done.returncode == 0, done.stderr
        orders = {**SEND, "messaging.destination.name": "orders"}
        assert points(done.stdout)["messaging.client.sent.messages"] == [(orders, 1)]
        eventually(lambda: Effect.objects.filter(number="step-one").exists(), within_seconds=90, what="the effects")

        def is_recorded() -> bool:
            found = of_worker()
            return (
                all(
                    (steps, 2) in found.get(name, [])
                    for name in ("messaging.client.consumed.messages", "messaging.process.duration")
                )
                and "messaging.client.sent.messages" in found
            )

        eventually(is_recorded, within_seconds=60, what=lambda: str(of_worker()))


# Each in a process of its own, after the imports that take longest. An argument has its apps, and the package that is
# not installed.
RECORDERS = """
import os, sys
import django, django.db.models, outbox.contrib.django, psycopg
from outbox.utils import measures
for line in sys.argv[1:]:
    if os.fork() == 0:
        os.environ["TEST_APPS"], _, missing = line.partition("|")
        if missing:
            sys.modules[missing] = None
        try:
            django.setup()
            print(type(measures.recorder).__name__, flush=True)
        except Exception as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


def test_each_app_records_its_own_and_names_the_package_that_it_needs() -> None:
    prometheus, opentelemetry = APPS["prometheus"], APPS["opentelemetry"]
    expected = {
        f"{prometheus}|": "PrometheusRecorder",
        f"{opentelemetry}|": "OpenTelemetryRecorder",
        f"{prometheus} {opentelemetry}|": "SimpleNamespace",
        f"{prometheus}|prometheus_client": "install outbox-transactional[metrics]",
        f"{opentelemetry}|opentelemetry": "install outbox-transactional[tracing]",
    }
    done = run(RECORDERS, arguments=expected)
    said = done.stdout.splitlines()
    assert len(said) == len(expected), done.stderr
    for line, text in zip(said, expected.values(), strict=True):
        assert text in line and (" " in text or text == line), done.stderr
