"""A cluster whose brokers and proxies are killed one by one under load: effects are the committed rows exactly."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from outbox.contrib.django.engine import broker as broker_access
from tests.django.shop.models import Order
from tests.rocketmq.cluster import RocketMQCluster
from tests.rocketmq.conftest import QUICK
from tests.rocketmq.project import Project, expected, happened, make_project, nothing_lost_invented_or_doubled
from tests.support import eventually

CHILD = ["-m", "outbox.contrib.django.worker.child"]
# Each round of a driver has five transactions, three of which commit or are part of one that commits.
ROUNDS = int(os.environ.get("CLUSTER_ROUNDS", "40"))


@pytest.fixture(params=["SYNC_FLUSH", "ASYNC_FLUSH"])
def cluster(request: pytest.FixtureRequest, programs: Path) -> Iterator[RocketMQCluster]:
    """A cluster that asks quickly, and often enough to outlast the promotion of a replica."""
    with tempfile.TemporaryDirectory(prefix="outbox-mq-", ignore_cleanup_errors=True) as folder:
        cluster = RocketMQCluster(Path(folder), programs, flush=request.param, **QUICK)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture
def project(cluster: RocketMQCluster, application: None, outbox_settings: Callable[..., None]) -> Iterator[Project]:
    """A project; this process is no producer, so that it answers no checks."""
    project = make_project(cluster)
    cluster.wait_for_topics(project.topics)
    outbox_settings(**project.outbox)
    yield project
    broker_access.reset_broker()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_effects_are_the_committed_rows_whatever_is_killed(project: Project, cluster: RocketMQCluster) -> None:
    """Each master once, which promotes its replica, and each proxy; the producers go on where they can."""
    killed, numbers, stop = Counter[str](), itertools.count(), threading.Event()
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(project.running([*CHILD, "consumer"]))
        stack.enter_context(project.running([*CHILD, "check"]))

        def produce() -> None:
            while not stop.is_set():
                project.produced({f"n{next(numbers)}": ""}, "trying", rounds=ROUNDS)

        producing = [threading.Thread(target=produce) for _ in range(2)]
        for one in producing:
            one.start()
        try:
            for victim in [*cluster.masters(), "p1", "p2"]:
                before = Order.objects.count()
                cluster.kill(victim)
                killed[victim] += 1
                cluster.wait_for_masters()
                eventually(partial(_more_than, before + ROUNDS), within_seconds=300, what="orders go on")
                cluster.start(victim)
        finally:
            stop.set()
            for one in producing:
                one.join()
        nothing_lost_invented_or_doubled(within_seconds=300)
    print(
        f"{Order.objects.count()} committed orders, {sum(happened().values())} of {len(expected())} effects, killed "
        f"{dict(killed)}"
    )


def _more_than(count: int) -> bool:
    return Order.objects.count() > count
