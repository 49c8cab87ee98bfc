"""A Django project on RocketMQ: committed means its effects happen once, rolled back means that no consumer sees it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outbox.contrib.django import get_broker
from outbox.contrib.django.engine import broker as broker_access
from outbox.rocketmq.broker import RocketMQBroker
from outbox.utils import faults
from tests.django.shop.models import Order
from tests.rocketmq.conftest import unique
from tests.rocketmq.driver import place
from tests.rocketmq.project import Project, happened, make_project, nothing_lost_invented_or_doubled
from tests.rocketmq_server import PrivateRocketMQ
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("application")

KILLED = -signal.SIGKILL
# No message of these tests is unique.
STEPS = [point for point in faults.POINTS if point.startswith("producer.") and point != "producer.after_options"]


@pytest.fixture
def project(rocketmq: PrivateRocketMQ, application: None, outbox_settings: Callable[..., None]) -> Iterator[Project]:
    """A project, whose settings are also those of this process: one more producer that answers checks."""
    project = make_project(rocketmq)
    outbox_settings(**project.outbox)
    yield project
    broker_access.flush(within_seconds=5)
    broker_access.reset_broker()


@pytest.mark.parametrize("decorated", [True, False], ids=["decorated", "plain"])
def test_from_the_decorator_to_the_handler(project: Project, decorated: bool) -> None:
    with project.consumer():
        place(project.topics[0], "one", decorated=decorated)
        with pytest.raises(Exception, match=r"^$"):
            place(project.topics[0], "two", decorated=decorated, fail=True)
        nothing_lost_invented_or_doubled()
    assert set(happened()) == {"one", "step-one"}


def test_a_lost_end_is_answered_from_the_ledger(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """No end is reported: RocketMQ asks this process, and the ledger answers COMMIT, and ROLLBACK by its barrier."""
    monkeypatch.setattr(RocketMQBroker, "end_one_way", lambda self, end: None)
    with project.consumer():
        place(project.topics[0], "committed", decorated=False)
        with pytest.raises(Exception, match=r"^$"):
            place(project.topics[0], "rolled back", decorated=False, fail=True)
        nothing_lost_invented_or_doubled()
    assert set(happened()) == {"committed", "step-committed"}


@pytest.mark.parametrize("how", [pytest.param("plain", marks=pytest.mark.soak), "decorated"])
def test_producer_killed_at_each_step(project: Project, how: str) -> None:
    """Each dies at another step, in its second round; this process answers for all of them."""
    get_broker().claim_checks("shop")
    reached = [step for step in STEPS if how == "decorated" or step != "producer.before_local_commit"]
    killed = {step: f"{step}=kill@2" for step in reached}
    with project.consumer():
        ends = project.produced({"whole": "", **killed}, how)
        assert ends.pop("whole") == 0
        assert set(ends.values()) == {KILLED}, "a fault that was never reached proves nothing"
        nothing_lost_invented_or_doubled()
    assert Order.objects.filter(number__startswith="whole").count() == 6


@pytest.mark.parametrize("seconds", [6, pytest.param(120, marks=pytest.mark.soak)])
def test_a_slow_local_transaction_outlives_its_checks(project: Project, seconds: int) -> None:
    """Asked about while it runs: the barrier waits for it, and the answer is UNKNOWN, never ROLLBACK."""
    with project.consumer():
        place(project.topics[0], "slow", decorated=False, seconds=seconds)
        nothing_lost_invented_or_doubled()
    assert set(happened()) == {"slow", "step-slow"}


def test_spans_follow_a_message_through_rocketmq(project: Project, tmp_path: Path) -> None:
    """From publishing to its handler, and on to the handler of what that one publishes."""
    file = tmp_path / "spans.jsonl"
    traced = replace(project, more={"TEST_APPS": "outbox.contrib.opentelemetry", "TEST_SPANS": str(file)})

    def spans(name: str) -> list[dict[str, Any]]:
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [span for span in map(json.loads, lines) if span["name"].partition(".")[0] == name]

    def traces(name: str) -> set[str]:
        return {span["context"]["trace_id"] for span in spans(name)}

    with traced.consumer(), traced.running(["-m", "tests.rocketmq.driver", "traced", "plain", "1"]) as driver:
        assert driver.wait(90) == 0
        # Two of its transactions commit.
        eventually(lambda: len(traces("process steps")) == 2, within_seconds=90, what=lambda: file.read_text())
    for name in ("process orders", "process steps"):
        assert all(span["parent_id"] is not None for span in spans(name))
    assert traces("process steps") <= traces("process orders")
    assert traces("process steps") <= traces("publish steps")


def test_a_starting_worker_names_the_missing_topics(project: Project) -> None:
    missing = replace(project, topics=(*project.topics[:2], unique("missing.")))
    with missing.running(["-m", "outbox.contrib.django.worker.child", "check"], quiet=False) as worker:
        assert worker.stderr is not None
        said = next(line for line in worker.stderr if "RocketMQ has no topic" in line)
    assert missing.topics[2] in said and "create it with message.type=" in said


def test_a_consumer_killed_in_its_handler_has_no_second_effect(project: Project) -> None:
    place(project.topics[0], "kills-one", decorated=False)
    with project.consumer() as first:
        assert first.wait(60) == KILLED
    assert happened() == {}
    with project.consumer():
        nothing_lost_invented_or_doubled()


def test_server_killed_and_restarted(project: Project, rocketmq: PrivateRocketMQ) -> None:
    """Acknowledged messages are stored; the local transactions of all others were rolled back."""
    with project.consumer():
        for number in range(5):
            place(project.topics[0], f"before-{number}", decorated=False)
        rocketmq.kill()
        with pytest.raises(Exception, match=r"RocketMQ|acknowledged|unknown"):
            place(project.topics[0], "while-down", decorated=False)
        rocketmq.start()
        _eventually_placed(project, "after")
        nothing_lost_invented_or_doubled()
    assert "while-down" not in happened()


def _eventually_placed(project: Project, number: str) -> None:
    """A user who tries again."""
    from outbox.errors import BrokerError

    def placed() -> Any:
        try:
            place(project.topics[0], number, decorated=False)
        except BrokerError:
            return False
        return True

    eventually(placed, within_seconds=60, what="the producer works again")
