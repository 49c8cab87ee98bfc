"""Metrics: figures of processes, figures of the broker's tables, and the rules made of both."""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import pytest
from django.db import transaction
from prometheus_client import CollectorRegistry, generate_latest

from outbox import Delivery, hooks
from outbox.broker.operations import audit
from outbox.broker.operations.summary import GroupProgress, Summary
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.operations.known_conditions import catalogue
from outbox.contrib.django.operations.watching import audit_when_due
from outbox.contrib.django.publishing.checkback import run_check_back
from outbox.contrib.django.worker import probes
from outbox.contrib.django.worker.periodic import passes
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.contrib.limits import Limits
from outbox.contrib.prometheus import collector
from outbox.contrib.prometheus.collector import BrokerCollector, ScrapeState
from outbox.contrib.prometheus.recorder import MOST_PAIRS, MOST_TOPICS, OTHERS, PrometheusRecorder
from outbox.contrib.prometheus.serving import state
from outbox.utils import measures
from tests.django.broker_world import NOWHERE, World, new_world
from tests.django.conftest import point_alias
from tests.django.processes import process
from tests.django.shop.models import Effect
from tests.house import alerts
from tests.prometheus import promtool
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")


@pytest.fixture
def world(databases: None, outbox_settings: Callable[..., None]) -> Iterator[World]:
    """A healthy broker."""
    with new_world(outbox_settings) as world:
        yield world


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    """Where this process's measures go during the test."""
    registry = CollectorRegistry()
    measures.install(PrometheusRecorder(registry))
    yield registry
    measures.install()


def samples(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {series: float(value) for series, _, value in (line.rpartition(" ") for line in lines)}


def test_a_process_measures_its_work(world: World, registry: CollectorRegistry) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        if delivery.key == "k1":
            raise ValueError("not this one")

    world.publish(3)
    with transaction.atomic():
        publish("payments", {}, key="bound")
    consumer_runtime(groups=["effects"]).run_once()
    world.half()
    run_check_back()
    found = samples(registry)
    place = '{group="effects",topic="orders"}'
    assert found['outbox_published_messages_total{path="direct",topic="orders"}'] == 3
    assert found['outbox_publish_seconds_count{path="two_phase"}'] == 2
    assert found[f"outbox_handler_seconds_count{place}"] == found[f"outbox_delivery_seconds_count{place}"] == 3
    assert found[f"outbox_failed_attempts_total{place}"] == 1
    assert found[f"outbox_delivery_start_seconds_sum{place}"] <= found[f"outbox_delivery_seconds_sum{place}"]
    assert found['outbox_checks_total{answer="rollback",producer_group="shop"}'] == 1


def test_topics_and_subscriptions_are_bounded(registry: CollectorRegistry) -> None:
    assert measures.recorder is not None
    for number in range(MOST_TOPICS + 50):
        measures.recorder.published([f"topic-{number}"], "direct", 0.001)
    for number in range(MOST_PAIRS + 50):
        measures.recorder.handled("g", f"topic-{number}", [0.1], 0.001, count=1, failures=[ValueError()])
    found = samples(registry)
    assert found[f'outbox_published_messages_total{{path="direct",topic="{OTHERS}"}}'] == 50
    assert len([name for name in found if name.startswith("outbox_published_messages_total")]) == MOST_TOPICS + 1
    counts = {name: value for name, value in found.items() if name.startswith("outbox_handler_seconds_count")}
    assert len(counts) == MOST_PAIRS + 1 and sum(counts.values()) == MOST_PAIRS + 50
    assert found[f'outbox_failed_attempts_total{{group="{OTHERS}",topic="{OTHERS}"}}'] == 50


def test_a_condition_that_is_not_known_has_no_sample(world: World) -> None:
    registry = CollectorRegistry()
    collected = BrokerCollector(state, registry)
    assert samples(registry)['outbox_condition{name="lag"}'] == 0
    point_alias("broker", NOWHERE)
    collected._kept = None
    found = {name: value for name, value in samples(registry).items() if name.startswith("outbox_condition")}
    assert found == {'outbox_condition{name="unreachable"}': 2}


def test_the_broker_s_tables(world: World) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None: ...

    world.publish(3)
    consumer_runtime(groups=["effects"]).run_once()
    world.publish(2)
    world.half()
    audit.run_once(world.run)
    registry = CollectorRegistry()
    BrokerCollector(state, registry)
    found = samples(registry)
    place = '{group="effects",topic="orders"}'
    assert (found[f"outbox_handled_messages_total{place}"], found[f"outbox_lag_messages{place}"]) == (3, 2)
    assert found['outbox_undecided_transactions{producer_group="shop"}'] == 1
    assert found['outbox_queued_messages_total{topic="orders"}'] == 5
    assert found['outbox_audit_messages{name="orders",scope="topics",term="undecided"}'] == 1
    assert found["outbox_audit_differences"] == 0
    assert found['outbox_table_bytes{table="default.outbox_ledger"}'] > 0
    assert found['outbox_table_bytes{table="commit_log"}'] > 0


def of_groups(metric: str, *places: tuple[str, str, int]) -> dict[str, float]:
    """The samples of a metric when these groups have this lag of these topics."""
    zeros = dict.fromkeys(("queued", "filtered", "skipped", "sent_back", "dead", "expired", "blocked", "stopped"), 0)
    groups = [
        GroupProgress(group=group, topic=topic, is_retry=False, paused=False, queues=1, lag=lag, oldest_at=None,
                      handled=0, **zeros)
        for group, topic, lag in places
    ]  # fmt: skip
    registry = CollectorRegistry()
    BrokerCollector(lambda: ScrapeState(state().verdict, None, Summary(0.0, 0.0, 0.0, groups, [], [], [])), registry)
    return {name: value for name, value in samples(registry).items() if name.startswith(metric)}


def test_pairs_are_bounded_and_nothing_is_left_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "MOST_PAIRS", 4)
    lags = of_groups("outbox_lag_messages", *((f"g{number % 2}", f"t{number}", 1) for number in range(10)))
    assert sum(lags.values()) == 10
    assert len(lags) <= 4 + 2 and any(OTHERS in name for name in lags)


def test_topics_above_the_bound_are_counted_as_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "MOST_PAIRS", 2)
    world.publish(3, "payments")
    now = state()
    assert now.summary is not None
    topics = [replace(now.summary.topics[0], topic=f"t{number}", queued=1) for number in range(5)]
    audited = audit.run_once(world.run)
    facts = {"topics": {f"t{number}": {"sent": 1} for number in range(5)}, "groups": {}}
    registry = CollectorRegistry()
    summary = replace(now.summary, topics=topics)
    BrokerCollector(lambda: ScrapeState(now.verdict, None, summary, replace(audited, facts=facts)), registry)
    found = samples(registry)
    queued = {name: value for name, value in found.items() if name.startswith("outbox_queued_messages_total")}
    assert sum(queued.values()) == 5 and len(queued) == 3
    assert found[f'outbox_audit_messages{{name="{OTHERS}",scope="topics",term="sent"}}'] == 3


def test_the_age_of_what_waits_is_absent_where_it_is_not_known(world: World) -> None:
    found = of_groups("outbox_lag_seconds", ("g", "waits", 1), ("g", "empty", 0))
    assert found == {'outbox_lag_seconds{group="g",topic="empty"}': 0.0}


@pytest.mark.whole
def test_rules_and_dashboard_match_the_catalogue() -> None:
    remedy = "run `python -m tests.house.tables`"
    assert alerts.ALERTS.read_text() == alerts.alerts(), remedy
    assert alerts.DASHBOARD.read_text() == alerts.dashboard() + "\n", remedy


def chosen(expression: str) -> str:
    """The expression as Grafana sends it after the user has chosen all values of the variables."""
    return expression.replace("$broker", ".*").replace("$job", ".*")


def asked() -> list[str]:
    panels = json.loads(alerts.DASHBOARD.read_text())["panels"]
    assert len(panels) == len(alerts.PANELS)
    return [target["expr"] for panel in panels for target in panel["targets"]]


@pytest.fixture
def exported(world: World, registry: CollectorRegistry) -> dict[str, float]:
    """Each series that a process exports after messages, check-backs, a tick and an audit."""

    @subscriber("orders", group="effects", options=[Limits(running=2)])
    def effect(delivery: Delivery) -> None: ...

    world.publish()
    consumer_runtime(groups=["effects"]).run_once()
    world.half()
    run_check_back()
    world.half()
    assert measures.recorder is not None
    measures.recorder.ticked(0.001, 1)
    audit.run_once(world.run)
    BrokerCollector(state, registry)
    return samples(registry)


def test_the_dashboard_uses_metrics_that_exist(exported: dict[str, float], tmp_path: Path) -> None:
    known = {series.partition("{")[0] for series in exported}
    assert {name for text in asked() for name in re.findall(r"outbox_\w+", text)} <= known
    if promtool.PROGRAM is not None:
        recorded = [{"record": f"panel:{number}", "expr": chosen(text)} for number, text in enumerate(asked())]
        (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": recorded}]}))
        promtool.check(tmp_path / "panels.yml")


def test_each_query_of_the_dashboard_separates_brokers_and_jobs() -> None:
    for text in asked():
        selectors = re.findall(r"outbox_\w+(\{[^}]*\})?", text)
        assert selectors and all('broker=~"$broker",job=~"$job"' in one for one in selectors), text
        # The figures of the broker's tables count once, although the worker and the web process export them.
        of_processes = re.search(r"outbox_(published|delivery|handler|publish|checks|tick)_", text)
        assert re.search(r"by \((le, )?broker", text) and ("max by (broker" in text) is not bool(of_processes), text
    variables = {one["name"]: one for one in json.loads(alerts.DASHBOARD.read_text())["templating"]["list"]}
    assert (variables["broker"]["allValue"], variables["job"]["allValue"]) == (".*", ".*")


@pytest.mark.skipif(promtool.PROGRAM is None, reason="promtool is not installed")
def test_no_exporting_process_is_an_alert_too(tmp_path: Path) -> None:
    promtool.check(alerts.ALERTS)
    text = alerts.ALERTS.read_text().split("alert: OutboxNotWatched")[1]
    [summary, description] = [json.loads(re.findall(rf"{name}: (.*)", text)[0]) for name in ("summary", "description")]
    expected = {
        "exp_labels": {"severity": "critical"},
        "exp_annotations": {"summary": summary, "description": description},
    }
    watched: promtool.Samples = {'outbox_condition{name="lag"}': 0}
    promtool.fires(tmp_path, "OutboxNotWatched", ({"up": 1}, [expected]), (watched, []))


@pytest.mark.skipif(promtool.PROGRAM is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    ("values", "severity"),
    [
        ("2x5 stale _x4", "critical"),
        ("1x10", "warning"),
        ("2x5 0x5", None),
        ("2x3 stale _x2 0x3", None),
        ("stale _x9", None),
    ],
)
def test_an_alert_continues_while_its_condition_is_unknown(tmp_path: Path, values: str, severity: str | None) -> None:
    kind = catalogue()["lag"]
    expected = {
        "exp_labels": {"severity": severity, "name": "lag"},
        "exp_annotations": {"summary": kind.meaning, "description": kind.next_step},
    }
    series: dict[str, float | str] = {'outbox_condition{name="lag",job="worker"}': values}
    promtool.fires(tmp_path, "OutboxLag", (series, [expected] if severity else []))


@pytest.mark.skipif(promtool.PROGRAM is None, reason="promtool is not installed")
def test_a_healthy_broker_does_not_silence_the_alert_of_another(tmp_path: Path) -> None:
    kind = catalogue()["lag"]
    expected = {
        "exp_labels": {"severity": "warning", "name": "lag", "broker": "shop"},
        "exp_annotations": {"summary": kind.meaning, "description": kind.next_step},
    }
    series: dict[str, float | str] = {
        'outbox_condition{name="lag",broker="shop"}': "1x5 stale _x4",
        'outbox_condition{name="lag",broker="bank"}': 0,
    }
    promtool.fires(tmp_path, "OutboxLag", (series, [expected]))


def test_the_audit_is_a_periodic_pass_that_is_not_repeated(world: World) -> None:
    assert "audit" in {one.name for one in passes()}
    assert audit_when_due()["differences"] == []
    assert "left_out" in audit_when_due()


@pytest.mark.slow
def test_a_worker_serves_what_its_processes_measure(
    databases: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_APPS", "outbox.contrib.prometheus")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "HEALTH_DIRECTORY": str(tmp_path / "signs"), "HEALTH_ADDRESS": f"127.0.0.1:{port}",
    }  # fmt: skip

    def fetched(path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as response:
                return str(response.read().decode())
        except OSError:
            return ""

    def scraped(series: str) -> bool:
        return series in fetched("/metrics")

    with process(["-m", "django", "outbox_worker"], outbox=settings, quiet=True):
        publish("orders", {}, key="one", at_once=True)
        eventually(lambda: Effect.objects.filter(number="step-one").exists(), within_seconds=60, what="the effects")
        eventually(lambda: '"healthy": true' in fetched("/ready"), within_seconds=30, what="readiness")
        assert '"healthy": true' in fetched("/live")
        # Of the consumer's process, of the broker's, and of the tables.
        for series in (
            'outbox_delivery_seconds_count{group="effects",topic="orders"} 1.0',
            "outbox_tick_seconds_count ",
            'outbox_handled_messages_total{group="effects",topic="steps"} 1.0',
            'outbox_condition{name="no_sequencer"} 0.0',
        ):
            eventually(partial(scraped, series), within_seconds=60, what=series)


def test_the_worker_s_figures_need_the_token(
    databases: None, outbox_settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hooks.served, "/metrics", "outbox.contrib.prometheus.serving.answer")
    outbox_settings(HEALTH_ADDRESS="127.0.0.1:0", STATUS_TOKEN="s3cret")
    with probes.served() as address:
        assert address is not None

        def status(token: str | None) -> int:
            connection = HTTPConnection("127.0.0.1", address[1], timeout=20)
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"} if token else {})
            return connection.getresponse().status

        assert (status(None), status("guessed"), status("s3cret")) == (403, 403, 200)
        outbox_settings(HEALTH_ADDRESS="127.0.0.1:0", STATUS_TOKEN=None)
        assert (status(None), status("s3cret")) == (200, 200)
        monkeypatch.setattr(probes, "ip_address", lambda _: ipaddress.ip_address("10.0.0.7"))
        assert (status(None), status("s3cret")) == (403, 403)
