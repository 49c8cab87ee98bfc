"""The processes of the benchmark of branches: one that takes the requests, one with the subscribers."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence

import psycopg

from benchmarks.harness import child_arguments
from outbox.broker.supervisor import stop_on_signals

REQUESTS = 1_200
THREADS = 4
STOCK_ROWS = 200
SELL = "UPDATE stock SET sold = sold + 1 WHERE id = %s"
APPLY = "INSERT INTO applied (order_id) VALUES (%s)"


def requests(kind: str, order_url: str, branch_urls: str) -> None:
    """Take the requests: four threads, each with its connections."""
    way = kind.partition(":")[2]
    place = place_by_xa(order_url, branch_urls.split(",")) if way == "xa" else place_with_messages(way, order_url)
    seconds: list[float] = []
    held: list[float] = []

    def worker(count: int) -> None:
        chance = random.Random()
        for _ in range(count):
            started = time.perf_counter()
            held.extend(place(chance.randint(1, STOCK_ROWS)))
            seconds.append(time.perf_counter() - started)

    worker(20)
    seconds.clear()
    held.clear()
    print("ready", flush=True)
    sys.stdin.readline()
    threads = [threading.Thread(target=worker, args=[REQUESTS // THREADS]) for _ in range(THREADS)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = len(seconds) / (time.perf_counter() - started)
    print(json.dumps({"rate": rate, "requests": seconds, "locks": held}), flush=True)
    sys.stdin.read()


def place_by_xa(order_url: str, branch_urls: Sequence[str]) -> Callable[[int], list[float]]:
    """Two-phase commit over all branches; the order's own commit is the coordinator's durable decision."""
    mine = threading.local()

    def place(stock: int) -> list[float]:
        if not hasattr(mine, "order"):
            mine.order = psycopg.connect(order_url, autocommit=True)
            mine.branches = [psycopg.connect(url) for url in branch_urls]
        order = uuid.uuid4()
        locked = []
        for index, branch in enumerate(mine.branches):
            branch.tpc_begin(branch.xid(1, str(order), str(index)))
            branch.execute(SELL, [stock])
            locked.append(time.perf_counter())
            branch.execute(APPLY, [order])
            branch.tpc_prepare()
        mine.order.execute("INSERT INTO placed (id) VALUES (%s)", [order])
        held = []
        for branch, since in zip(mine.branches, locked, strict=True):
            branch.tpc_commit()
            held.append(time.perf_counter() - since)
        return held

    return place


def place_with_messages(way: str, order_url: str) -> Callable[[int], list[float]]:
    """The order and one message: in its transaction, or after its commit."""
    configure(order_url, [])
    from django.db import connection, transaction

    from outbox.contrib.django import publish

    def place(stock: int) -> list[float]:
        order = uuid.uuid4()
        with transaction.atomic():
            connection.cursor().execute("INSERT INTO placed (id) VALUES (%s)", [order])
            if way == "messages":
                publish("orders", {"order": order, "stock": stock}, key=order)
        if way == "naive":
            publish("orders", {"order": order, "stock": stock}, key=order, at_once=True)
        return []

    return place


def consumer(kind: str, order_url: str, branch_urls: str) -> None:
    """One process with a subscriber group per branch, until SIGTERM."""
    urls = branch_urls.split(",")
    configure(order_url, urls)
    from django.db import connections, transaction

    from outbox import Delivery
    from outbox.contrib.django import subscriber
    from outbox.contrib.django.worker.workers import run_consumer_role

    held: list[float] = []

    def subscribe(alias: str) -> None:
        @subscriber("orders", group=alias, using=alias, idempotent=kind == "consumer:messages", threads=2)
        def apply(delivery: Delivery) -> None:
            with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
                cursor.execute(SELL, [delivery.body["stock"]])
                since = time.perf_counter()
                cursor.execute(APPLY, [delivery.body["order"]])
                transaction.on_commit(lambda: held.append(time.perf_counter() - since), using=alias)

    for index in range(len(urls)):
        subscribe(f"branch_{index}")
    stop = threading.Event()
    stop_on_signals(stop)
    threading.Thread(target=report_locks, args=(order_url, held, stop), daemon=True).start()
    print("ready", flush=True)
    run_consumer_role(stop)


def report_locks(order_url: str, held: list[float], stop: threading.Event) -> None:
    """Tell how long rows were locked, a few times a second."""
    with psycopg.connect(order_url, autocommit=True) as connection:
        while not stop.wait(0.2):
            batch, held[:] = held[:], held[len(held) :]
            if batch:
                connection.execute("INSERT INTO locked SELECT unnest(%s::float8[])", [batch])


def configure(order_url: str, branch_urls: Sequence[str]) -> None:
    """Django with the order's database, which the broker shares, and those of the branches; migrated."""
    import django
    from django.conf import settings

    from outbox.contrib.django.databases import database_from_url

    urls = {"default": order_url, **{f"branch_{index}": url for index, url in enumerate(branch_urls)}}
    settings.configure(
        INSTALLED_APPS=["outbox.contrib.django"],
        DATABASES={alias: database_from_url(url, CONN_MAX_AGE=None) for alias, url in urls.items()},
        DATABASE_ROUTERS=["outbox.contrib.django.routers.BrokerRouter"],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        USE_TZ=True,
        OUTBOX={
            "BROKER": "default",
            "PRODUCER_GROUP": "bench",
            "TOPICS": {"orders": {"types": ["NORMAL", "TRANSACTION"]}},
        },
    )
    django.setup()
    from django.core.management import call_command

    for alias in urls:
        call_command("migrate", database=alias, verbosity=0)


if __name__ == "__main__":
    role, *databases = child_arguments()
    {"requests": requests, "consumer": consumer}[role.partition(":")[0]](role, *databases)
