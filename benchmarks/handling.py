"""Measure one consumer process of a Django project that handles queued messages (inbox.py, claims.py)."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import psycopg

from benchmarks.bulk import BODY, QUEUED, process, wait_for
from benchmarks.harness import Usage, measured
from benchmarks.processes import postmaster, tree
from outbox.broker import embedded
from outbox.broker.consumer.runtime import tune_garbage_collector
from outbox.broker.database.connection import BrokerDatabase
from outbox.broker.postgres import PostgresBroker
from outbox.message import Message

EFFECTS = "SELECT count(*) FROM shop_order"
_SENT_AT_ONCE = 500


@dataclass(frozen=True)
class Handled:
    """What one run measured. `said`: the line that the child printed when it was ready.

    `cpu_micros`: CPU of the consumer process and of the server, per message. `usage`: of both databases together.
    """

    said: str
    rate: float
    cpu_micros: float
    usage: Usage


def handle(script: str, url: str, name: str, kind: str, count: int) -> Handled:
    """Let a child of `benchmarks.SCRIPT` handle `count` messages, in databases of its own with this name."""
    application, broker_url = embedded.create_database(url, name), embedded.create_database(url, f"{name}_broker")
    command = [sys.executable, "-m", f"benchmarks.{script}", "--child", kind, application, broker_url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        said = running.stdout.readline()
        _send(broker_url, count)
        with process("outbox.broker", broker_url):
            wait_for(broker_url, QUEUED, count)
        with psycopg.connect(application, autocommit=True) as connection:
            first = postmaster(connection)
        # Both databases are on one server, whose transaction ids, WAL and CPU are counted.
        with measured(application) as usage:
            began, started = _cpu_seconds(first, running.pid), time.perf_counter()
            running.stdin.write("go\n")
            running.stdin.flush()
            wait_for(application, EFFECTS, count)
            seconds = time.perf_counter() - started
            used = _cpu_seconds(first, running.pid) - began
        running.stdin.close()
    return Handled(said, count / seconds, used * 1e6 / count, usage())


def consume(said: str) -> None:
    """In the child: say that the subscriber is registered, wait for the messages, and handle them until the end."""
    from django.db import connection

    from outbox.contrib.django.worker.workers import consumer_runtime

    connection.close()
    # As the consumer processes of a worker do.
    tune_garbage_collector()
    stop = threading.Event()
    print(said, flush=True)
    sys.stdin.readline()

    def end() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=end, daemon=True).start()
    consumer_runtime().run(stop)


def _send(url: str, count: int) -> None:
    broker = PostgresBroker(BrokerDatabase(conninfo=url))
    for start in range(0, count, _SENT_AT_ONCE):
        broker.send([Message(topic="order.paid", body=BODY) for _ in range(min(_SENT_AT_ONCE, count - start))])
    broker.close()


def _cpu_seconds(*roots: int) -> float:
    """The CPU that these processes and their children have used."""
    return sum(one.seconds + one.of_ended_children for root in roots for one in tree(root))
