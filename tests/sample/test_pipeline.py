"""The three stages of the income under kills: the shown income equals the sum of the orders exactly."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psycopg
import pytest
from psycopg import sql

from outbox.broker import embedded
from sample_project import provider
from sample_project.demo import figures
from tests.sample.conftest import ROOT
from tests.support import eventually

PREFIX: Final = f"pipeline_{os.getpid()}"
PYTHON: Final = [sys.executable]
# Every third order is not paid, the last thing before COMMIT.
PRODUCER: Final = """
import django, sys; django.setup()
from decimal import Decimal
from django.db import transaction
from sample_project.orders.models import Order
from sample_project.orders.services import Line, mark_paid, place_order
for number in range(Order.objects.count(), int(sys.argv[1])):
    order = place_order("kate", [Line(product_slug="ink", name="Ink", unit_price=Decimal(number % 90 + 1), quantity=1)])
    try:
        with transaction.atomic():
            mark_paid(order.pk)
            if number % 3 == 2:
                raise ValueError
    except ValueError:
        pass
"""
PROGRAMS: Final = {
    "broker": ["-m", "outbox.contrib.django.worker.child", "broker"],
    "consumer": ["-m", "outbox.contrib.django.worker.child", "consumer"],
    "check": ["-m", "django", "outbox_worker", "--role", "check"],
}


@pytest.fixture
def environment(server_url: str) -> Iterator[dict[str, str]]:
    """The environment of the processes of a fresh shop, whose payment provider is a thread of this process."""
    with provider.running(slow_seconds=0.2) as asked:
        yield from _environment(server_url, asked.url)


def _environment(server_url: str, provider_url: str) -> Iterator[dict[str, str]]:
    found = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "sample_project.settings",
        "OUTBOX_POSTGRES_URL": server_url,
        "SAMPLE_SERVER_URL": server_url,
        "SAMPLE_DATABASE_PREFIX": PREFIX,
        "SAMPLE_PAYMENT_PROVIDER": provider_url,
        "SAMPLE_IMMUNITY_SECONDS": "0",
        "SAMPLE_CHECK_INTERVAL_SECONDS": "0.5",
        "RECONCILE_ORDERS": embedded.database_url(server_url, f"{PREFIX}_orders"),
        "RECONCILE_BROKER": embedded.database_url(server_url, f"{PREFIX}_broker"),
    }
    for arguments in (["migrate"], ["migrate", "--database=broker"]):
        command = [*PYTHON, "-m", "sample_project.manage", *arguments, "--no-input"]
        done = subprocess.run(command, cwd=ROOT, env=found, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    yield found
    with psycopg.connect(server_url, autocommit=True) as connection:
        for name in ("orders", "broker", "celery"):
            database = sql.Identifier(f"{PREFIX}_{name}")
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(database))


class Pipeline:
    """The shop's processes, killed and started again."""

    def __init__(self, environment: dict[str, str], count: int) -> None:
        self._environment = environment
        self._programs = {**PROGRAMS, "producer": ["-c", PRODUCER, str(count)]}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.kills = Counter[str]()
        for name in self._programs:
            self._start(name)

    def _start(self, name: str) -> None:
        self._running[name] = subprocess.Popen(
            [*PYTHON, *self._programs[name]], cwd=ROOT, env=self._environment, stderr=subprocess.DEVNULL
        )

    def kill(self, name: str) -> None:
        """Kill a process, and start it again."""
        self._running[name].kill()
        self._running[name].wait()
        self.kills[name] += 1
        self._start(name)

    @property
    def is_producing(self) -> bool:
        """Whether orders are still placed. Raises AssertionError when the producer failed."""
        code = self._running["producer"].poll()
        assert code in (None, 0), "the producer failed"
        return code is None

    def close(self) -> None:
        """End all."""
        for running in self._running.values():
            running.kill()
            running.wait()


@contextmanager
def bounced(environment: dict[str, str], count: int, seed: int) -> Iterator[Pipeline]:
    """A pipeline whose producer has ended, with every kind of process killed on the way."""
    chance, pipeline = random.Random(seed), Pipeline(environment, count)
    try:
        while pipeline.is_producing or not all(pipeline.kills[name] for name in PROGRAMS):
            time.sleep(chance.uniform(0.1, 0.8))
            pipeline.kill(chance.choice(sorted(PROGRAMS)))
            # After some progress only: one that is killed while it starts would never end.
            if pipeline.is_producing and placed(environment) > count * (pipeline.kills["producer"] + 1) // 3:
                pipeline.kill("producer")
        yield pipeline
    finally:
        pipeline.close()


def placed(environment: dict[str, str]) -> int:
    with psycopg.connect(environment["RECONCILE_ORDERS"]) as orders:
        row = orders.execute("SELECT count(*) FROM orders_order").fetchone()
    assert row is not None
    return int(row[0])


def read(environment: dict[str, str]) -> figures.Figures:
    with (
        psycopg.connect(environment["RECONCILE_ORDERS"]) as orders,
        psycopg.connect(environment["RECONCILE_BROKER"]) as broker,
    ):
        return figures.read(orders, broker)


def run(environment: dict[str, str], count: int, seed: int) -> None:
    with bounced(environment, count, seed) as pipeline:
        eventually(
            lambda: read(environment).settled,
            within_seconds=600,
            what=lambda: f"the last stage equals the orders: {read(environment)}",
        )
        found = read(environment)
    assert placed(environment) == count
    assert found.paid <= count - count // 3
    assert (found.lost, found.invented, found.doubled, found.minutes_off, found.dead) == (0, 0, 0, 0, 0)
    print(f"{count} orders, {found.paid} paid, seed {seed}, kills {dict(pipeline.kills)}")


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_three_stages_add_up_to_the_orders_under_kills(environment: dict[str, str]) -> None:
    run(environment, 60, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_three_stages_under_kills_for_minutes_are_reconciled_by_spark_too(
    environment: dict[str, str], tmp_path: Path
) -> None:
    run(environment, 5_000, seed=2)
    rules = f"--rules={ROOT / 'sample_project' / 'reconcile.toml'}"
    command = [str(Path(sys.executable).parent / "outbox-reconcile"), "run", rules, f"--output={tmp_path}", "--full"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [result] = tmp_path.rglob("result.json")
    counts = {rule["name"]: rule["counts"] for rule in json.loads(result.read_text())["rules"]}
    assert set(counts) == {"paid orders", "shipments", "enriched orders"}
    assert counts["enriched orders"]["OK"] == read(environment).paid
