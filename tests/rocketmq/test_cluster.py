"""A cluster with the settings of the documents, whose processes are killed: effects are the committed rows exactly."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outbox.contrib.django.engine import broker as broker_access
from outbox.errors import BrokerError
from outbox.message import Message
from outbox.rocketmq.admin import Admin, brokers_of, read_stored
from outbox.rocketmq.broker import RocketMQBroker
from outbox.rocketmq.exhausted import READER
from outbox.topic import Topic
from sample_project.rocketmq_server import fetch_programs
from tests.django import processes
from tests.django.shop.models import Order
from tests.documents import blocks
from tests.rocketmq.cluster import BROKERS, PAGE, PROXIES, RocketMQCluster, choose_ports, write_programs
from tests.rocketmq.conftest import PROGRAMS, QUICK, ROOT, unique
from tests.rocketmq.disk import Disk
from tests.rocketmq.project import Project, expected, happened, make_project, nothing_lost_invented_or_doubled
from tests.rocketmq.test_campaign import STEPS
from tests.support import eventually

# The version that docs/rocketmq-cluster.md recommends.
VERSION = "5.5.0"
CHILD = ["-m", "outbox.contrib.django.worker.child"]
CHILDREN = {"check": [*CHILD, "check"], "consumer-1": [*CHILD, "consumer"], "consumer-2": [*CHILD, "consumer"]}
TRANSACTIONS = int(os.environ.get("CLUSTER_TRANSACTIONS", "2000"))
SEED = os.environ.get("CLUSTER_SEED", "1")


@contextmanager
def running_cluster(version: str = VERSION, *, disks: bool = False, **settings: object) -> Iterator[RocketMQCluster]:
    """A cluster that asks quickly, and often enough to outlast the promotion of a replica.

    With `disks`, each broker has a disk of its own.
    """
    with tempfile.TemporaryDirectory(prefix="outbox-mq-", ignore_cleanup_errors=True) as folder:
        cluster = RocketMQCluster(Path(folder), fetch_programs(PROGRAMS, version), **{**QUICK, **settings})
        try:
            if disks:
                for name in BROKERS:
                    cluster.disks[name] = Disk(Path(folder) / name)
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture
def cluster(programs: Path, request: pytest.FixtureRequest) -> Iterator[RocketMQCluster]:
    """The cluster of a test; a parameter is its flushDiskType."""
    flush = getattr(request, "param", "ASYNC_FLUSH")
    with running_cluster(flushDiskType=flush) as cluster:
        yield cluster


@pytest.fixture
def project(cluster: RocketMQCluster, application: None, outbox_settings: Callable[..., None]) -> Iterator[Project]:
    """A project; this process is no producer, so that it answers no checks."""
    project = make_project(cluster)
    cluster.wait_for_topics(project.topics)
    outbox_settings(**project.outbox)
    yield project
    broker_access.reset_broker()


class Load:
    """Producers of random transactions and the processes of a worker, which are started again when they die."""

    def __init__(self, project: Project, folder: Path, seed: str) -> None:
        self.killed = Counter[str]()
        self._project = project
        self._file = folder / "outcomes"
        self._file.touch()
        self._chance = random.Random(f"load-{seed}")
        self._stack = ExitStack()
        self._children: dict[str, subprocess.Popen[str]] = {}
        self._numbers = itertools.count()
        self._producing = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tend)

    def __enter__(self) -> Load:
        self._producing.set()
        self._thread.start()
        return self

    def __exit__(self, *given: object) -> None:
        self._stop.set()
        self._thread.join()
        self._stack.close()

    def outcomes(self) -> dict[str, str]:
        """The outcome of each finished transaction, as its caller saw it, by number."""
        lines = self._file.read_text(encoding="utf-8").split("\n")[:-1]
        return {number: outcome for outcome, number in (line.split(",") for line in lines)}

    def kill(self, name: str) -> None:
        """Kill a producer or a worker's process."""
        child = self._children.get(name)
        if child is not None and child.poll() is None:
            child.kill()
            self.killed["producers" if name.startswith("producer") else "worker processes"] += 1

    def end(self) -> None:
        """Start no more producers, and wait for those that run."""
        self._producing.clear()
        eventually(
            lambda: all(child.poll() is not None for name, child in self._children.items() if name not in CHILDREN),
            within_seconds=300,
            what="producers end",
        )

    def _tend(self) -> None:
        while not self._stop.wait(0.2):
            for name, arguments in CHILDREN.items():
                self._start(name, arguments, "")
            if self._producing.is_set():
                for name in ("producer-1", "producer-2"):
                    self._start(name, *self._producer())

    def _producer(self) -> tuple[list[str], str]:
        number = next(self._numbers)
        dies = self._chance.random() < 0.3
        faults = f"{self._chance.choice(STEPS)}=kill@{self._chance.randint(1, 150)}" if dies else ""
        return ["-m", "tests.rocketmq.random_driver", f"r{number}", f"{number}", "200", str(self._file)], faults

    def _start(self, name: str, arguments: list[str], faults: str) -> None:
        child = self._children.get(name)
        if child is not None and child.poll() is None:
            return
        if child is not None and name.startswith("producer") and child.returncode == -signal.SIGKILL:
            self.killed["producers that killed themselves"] += 1
        self._children[name] = self._stack.enter_context(self._project.running(arguments, faults=faults))


def disturb(cluster: RocketMQCluster, load: Load, chance: random.Random) -> None:
    """Kill, freeze or cut something for a while, and bring it back."""
    kind = chance.choice(
        ["master", "master", "master", "replica", "group", "proxy", "frozen proxy", "cut", "names", "process"]
    )
    load.killed[kind] += 1
    group = chance.choice("ab")
    proxy = chance.choice(PROXIES)
    if kind == "process":
        load.kill(chance.choice([*CHILDREN, "producer-1", "producer-2"]))
    elif kind == "cut":
        cluster.links[proxy].cut()
        time.sleep(chance.uniform(1, 30))
        cluster.links[proxy].mend()
    elif kind == "frozen proxy":
        cluster.freeze(proxy)
        time.sleep(chance.uniform(1, 30))
        cluster.thaw(proxy)
    else:
        master = cluster.master(group)
        victims = {
            "master": [master],
            "replica": [name for name in BROKERS if name[0] == group and name != master],
            "group": [name for name in BROKERS if name[0] == group],
            "proxy": [proxy],
            "names": ["names"],
        }[kind]
        for name in victims:
            cluster.kill(name)
        if kind == "master":
            cluster.wait_for_masters()
        time.sleep(chance.uniform(0, 5))
        cluster.start(*victims)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("cluster", ["ASYNC_FLUSH", "SYNC_FLUSH"], indirect=True)
def test_effects_are_the_committed_rows_whatever_is_killed(
    cluster: RocketMQCluster, project: Project, tmp_path: Path
) -> None:
    """Random transactions, and random kills of all processes but PostgreSQL's, frozen proxies and cut networks."""
    chance, began = random.Random(f"campaign-{SEED}"), time.monotonic()
    with Load(project, tmp_path, SEED) as load:
        while len(load.outcomes()) < TRANSACTIONS:
            before = Order.objects.count()
            eventually(partial(_more_than, before + 20), within_seconds=300, what="orders go on")
            disturb(cluster, load, chance)
        load.end()
        took = time.monotonic() - began
        nothing_lost_invented_or_doubled(within_seconds=600)
        outcomes = load.outcomes()
    orders = set(Order.objects.values_list("number", flat=True))
    wrong = [number for number, outcome in outcomes.items() if (outcome == "committed") != (number in orders)]
    assert wrong == []
    print(
        f"seed {SEED}: {len(outcomes)} transactions in {took:.0f} s: {dict(Counter(outcomes.values()))}; "
        f"{len(orders)} committed orders, {sum(happened().values())} of {len(expected())} effects; "
        f"{dict(load.killed)}"
    )


def _more_than(count: int) -> bool:
    return Order.objects.count() > count


class Sending:
    """Threads that send numbered messages outside of transactions; `acknowledged` are those that RocketMQ confirmed."""

    def __init__(self, broker: RocketMQBroker, topic: Topic) -> None:
        self.acknowledged = list[str]()
        self._broker = broker
        self._topic = topic
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(8)]

    def __enter__(self) -> Sending:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *given: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        while not self._stop.is_set():
            key = str(next(self._numbers))
            try:
                self._broker.send([Message(topic=self._topic.name, body=b"1", key=key)], timeout_seconds=3)
            except BrokerError:
                continue
            self.acknowledged.append(key)


def stored(cluster: RocketMQCluster, topic: Topic) -> set[str]:
    """The keys of the messages that the brokers have."""
    return {
        message.properties.get("KEYS", "").split(" ")[0]
        for admin in cluster.admins
        for queue in range(topic.queue_count)
        for message in read_stored(admin, READER, admin.name(topic.name), 0, queue)
    }


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_what_a_crash_loses(flush: str, programs: Path) -> None:
    """The processes of all brokers; the machines of both masters; the machines of all brokers at the same moment."""
    topic = Topic(name=unique("orders."), queue_count=2)
    lost = dict[str, int]()
    with running_cluster(disks=True, flushDiskType=flush) as cluster:
        for admin in cluster.admins:
            admin.create_topic(topic)
        cluster.wait_for_topics([topic.name])
        broker = RocketMQBroker(cluster.url, [topic], timeout_seconds=3)
        try:
            for what in ("processes", "machines of masters", "all machines"):
                with Sending(broker, topic) as sending:
                    before = len(sending.acknowledged)
                    eventually(partial(_grown, sending.acknowledged, before + 300), within_seconds=300)
                    victims = cluster.masters() if what == "machines of masters" else list(BROKERS)
                    cluster.kill_at_once(*victims)
                    acknowledged = list(sending.acknowledged)
                    for name in victims if what != "processes" else []:
                        cluster.disks[name].lose_power()
                if what == "machines of masters":
                    cluster.wait_for_masters()
                cluster.start(*victims)
                lost[what] = len(set(acknowledged) - stored(cluster, topic))
                print(f"{flush}, {what}: {lost[what]} of {len(acknowledged)} acknowledged messages are lost")
        finally:
            broker.close()
    assert (lost["processes"], lost["machines of masters"]) == (0, 0)
    assert (lost["all machines"] == 0) is (flush == "SYNC_FLUSH")


def _grown(what: list[str], size: int) -> bool:
    return len(what) >= size


@pytest.mark.timeout(600)
def test_a_promoted_replica_goes_on_where_its_master_died(
    cluster: RocketMQCluster, project: Project, tmp_path: Path
) -> None:
    """Both masters die while transactions run, and while the replicas catch up nothing is lost or handled twice."""
    with Load(project, tmp_path, "promotion") as load:
        eventually(partial(_more_than, 20), within_seconds=120, what="orders")
        for victim in cluster.masters():
            before = Order.objects.count()
            cluster.kill(victim)
            cluster.wait_for_masters()
            assert victim not in cluster.masters()
            eventually(partial(_more_than, before + 50), within_seconds=120, what="orders go on")
        load.end()
        nothing_lost_invented_or_doubled(within_seconds=240)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_newcomer_starts_a_cluster_by_the_page(
    programs: Path, application: None, outbox_settings: Callable[..., None], tmp_path: Path
) -> None:
    """Bash runs the blocks of the page one after the other; only the ports are the test's own."""
    write_programs(tmp_path / "programs", fetch_programs(PROGRAMS, VERSION))
    manage = tmp_path / "programs" / "manage.py"
    manage.write_text(f'#!/bin/sh\ncd {ROOT}\nexec {sys.executable} -m django "$@"\n')
    manage.chmod(0o755)
    variables, *others, stop = blocks(PAGE, "sh")
    [settings] = blocks(PAGE, "python")
    ports = choose_ports()
    for name, port in re.findall(r"(\w+)=(\d+)", variables):
        variables = variables.replace(f"{name}={port}", f"{name}={ports[name]}")
        settings = settings.replace(f":{port}", f":{ports[name]}")
    given: dict[str, Any] = {}
    exec(settings, given)
    server = Address(given["OUTBOX"]["BROKER"])
    project = Project(server, (unique("orders."), unique("steps."), unique("later.")), unique("effects"))
    environment = {
        **processes.environment(),
        **project.environment(),
        "PATH": f"{tmp_path / 'programs'}:{os.environ['PATH']}",
    }
    try:
        script = "\n".join([variables, *others])
        subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=environment, check=True, timeout=400)
        with project.consumer():
            assert project.produced({"a": "", "b": ""}) == {"a": 0, "b": 0}
            nothing_lost_invented_or_doubled()
    finally:
        subprocess.run(["bash", "-uc", f"{variables}\n{stop}"], cwd=tmp_path, check=True)
    assert len(happened()) == 24


@dataclass(frozen=True)
class Address:
    """The address of a cluster (tests.rocketmq.project.Server)."""

    url: str

    @property
    def admins(self) -> list[Admin]:
        """The administration ports of its brokers."""
        return brokers_of(self.url)
