"""A project moves from PostgreSQL to RocketMQ and back by its settings alone, as docs/operations/upgrade.md says."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from django.core.management import call_command

from outbox.contrib.django.engine import broker as broker_access
from tests.django.shop.models import Order
from tests.rocketmq.conftest import running_server
from tests.rocketmq.project import Project, happened, make_project, nothing_lost_invented_or_doubled
from tests.rocketmq_server import PrivateRocketMQ
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("application")

WORKER = ["-m", "django", "outbox_worker"]
KILLED = -signal.SIGKILL


@pytest.fixture
def rocketmq(programs: Path) -> Iterator[PrivateRocketMQ]:
    """A server of this test's own: a broker counts undecided and delivered messages for all its topics together."""
    with running_server(programs) as server:
        yield server


@pytest.fixture
def project(rocketmq: PrivateRocketMQ, application: None, outbox_settings: Callable[..., None]) -> Iterator[Project]:
    """A project whose topics both brokers have; this process reads its databases only."""
    project = make_project(rocketmq)
    outbox_settings(**replace(project, on_postgres=True).outbox)
    call_command("outbox_install", verbosity=0)
    yield project
    broker_access.reset_broker()


@pytest.mark.parametrize("to", [pytest.param(to, marks=pytest.mark.soak) for to in ("rocketmq", "postgres")])
def test_moved_while_it_works(project: Project, to: str) -> None:
    """At the switch the old broker has messages of every kind in flight, and its worker dies with some in hand."""
    before, after = (replace(project, on_postgres=postgres) for postgres in (to == "rocketmq", to == "postgres"))
    drained = [*WORKER, "--until-drained"]
    with ExitStack() as stack:
        old = stack.enter_context(before.running(WORKER))
        undecided = {"fell-1": "producer.before_end=kill@4", "fell-2": "producer.after_local_commit=kill@5"}
        publishing = {
            name: stack.enter_context(before.running(driver(name), faults=faults))
            for name, faults in {"old": "", **undecided}.items()
        }
        eventually(lambda: any("old" in number for number in happened()), within_seconds=90, what="the old one works")
        stack.enter_context(after.running(WORKER))
        new = stack.enter_context(after.running(driver("new")))
        ends = {name: process.wait(120) for name, process in publishing.items()}
        assert ends == {"old": 0, "fell-1": KILLED, "fell-2": KILLED}, "a fault that was never reached proves nothing"
        old.kill()
        leaving = stack.enter_context(before.running(drained))
        assert leaving.wait(200) == 0
        assert leaving.stdout is not None and "nothing is left on the broker" in leaving.stdout.read()
        old_orders = set(Order.objects.exclude(number__startswith="new").values_list("number", flat=True))
        assert old_orders <= set(happened()), "the drained broker had them"
        assert new.wait(120) == 0
        nothing_lost_invented_or_doubled()


def driver(prefix: str) -> list[str]:
    """A process that publishes; one that falls may leave an order whose message, outside of a transaction, is not."""
    return ["-m", "tests.rocketmq.driver", prefix, "plain" if "fell" in prefix else "moving", "6"]
