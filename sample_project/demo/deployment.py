"""The long form of the demo: version 2 of `order.paid` is deployed while customers pay.

Until here, all processes run the code of version 1. The new site starts before the new worker: so old code meets
messages of version 2, which is the harder order of a deployment. Each step waits for what it must show.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, LiteralString

import psycopg

from sample_project.demo.display import Display
from sample_project.demo.processes import Services
from sample_project.demo.shopper import Answers, Crowd
from sample_project.demo.verdicts import Verdict, exactly, some

# The environment of a process with the code from before the deployment.
OLD: Final = {"SAMPLE_ORDER_PAID": "1"}
_NEW: Final = {"SAMPLE_ORDER_PAID": "2"}
# Customers who come until the old and the new code have met.
_ENDLESS: Final = 1_000_000
_LAST: Final = 20
_WITHIN_SECONDS: Final = 180.0

_BY_VERSION: Final[LiteralString] = """
SELECT headers::jsonb ->> 'outbox-event-version', array_agg(key)
FROM outbox.message_v1 WHERE topic = 'order.paid' AND state = 'committed' GROUP BY 1
"""
_WAITING_GROUPS: Final[LiteralString] = """
SELECT count(DISTINCT group_id) FROM outbox.unknown_version WHERE event = 'order.paid' AND version = 2
"""
_SHIPPED: Final = re.compile(r"order (\d+) has shipment")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The result: the new site's port, the customers of the deployment, and what was seen meanwhile.

    `waiting_groups` counts the groups of the old worker in which version 2 waited, `converted` the orders of version 1
    that the new worker has shipped.
    """

    port: int
    customers: int
    answers: Answers
    waiting_groups: int
    converted: int


class _Seen:
    """What the broker and the log of the new worker show of both versions."""

    def __init__(self, broker: psycopg.Connection, services: Services) -> None:
        self._broker, self._services = broker, services

    def waiting_groups(self) -> int:
        row = self._broker.execute(_WAITING_GROUPS).fetchone()
        assert row is not None
        return int(row[0])

    def converted(self) -> int:
        """The orders of version 1 that the new worker has shipped."""
        log = self._services.log("new-worker")
        shipped = set(_SHIPPED.findall(log.read_text(errors="replace"))) if log.exists() else set()
        return len(shipped & set(keys_by_version(self._broker).get("1", ())))


def keys_by_version(broker: psycopg.Connection) -> dict[str, list[str]]:
    """The keys of the committed messages of order.paid, by the version in their header."""
    return {version or "": keys for version, keys in broker.execute(_BY_VERSION)}


def deploy(
    services: Services,
    display: Display,
    broker: psycopg.Connection,
    *,
    old_port: int,
    new_port: int,
    shoppers: int,
    answers: Callable[[int], bool],
) -> Deployment:
    """Replace site and worker while customers pay. `answers` says whether a site answers at a port.

    Raises DemoFailed if the old and the new code do not meet in time, or if a process ends by itself.
    """
    seen = _Seen(broker, services)
    display.step("a deployment begins: order.paid gets version 2; the new site starts before the new worker")
    bind = {"SAMPLE_BIND": f"127.0.0.1:{new_port}"}
    services.start("new-site", "gunicorn", "--config=python:sample_project.gunicorn_conf", environment={**_NEW, **bind})
    services.wait_until(lambda: answers(new_port), what="the new site's answer", log="new-site", within_seconds=60)
    both = Crowd(old_port, new_port, orders=_ENDLESS, shoppers=shoppers)
    last = Crowd(new_port, orders=_LAST, shoppers=shoppers)
    both.start()
    both.start_others()
    try:
        _wait(services, seen.waiting_groups, what="a message of version 2 that waits for new code", log="worker")
        waiting = seen.waiting_groups()
        display.note(f"messages of version 2 wait in {waiting} groups of the old worker: it knows version 1 only")
        services.start("new-worker", "sample_project.manage", "outbox_worker", environment=_NEW)
        _wait(services, seen.converted, what="an order of version 1 that the new worker ships", log="new-worker")
        display.note("the new worker handles both versions: @upcast converts the messages of the old site")
    finally:
        both.send_home()
    last.start()
    last.start_others()
    try:
        display.step("the old site and the old worker stop; the last customers come to the new site")
        services.end("site")
        services.end("worker")
        pause = threading.Event()
        while not last.done():
            services.check_alive()
            pause.wait(0.1)
    finally:
        last.send_home()
    return Deployment(
        port=new_port,
        customers=both.served + last.served,
        answers=both.answers.with_others(last.answers),
        waiting_groups=waiting,
        converted=seen.converted(),
    )


def _wait(services: Services, count: Callable[[], int], *, what: str, log: str) -> None:
    services.wait_until(lambda: count() > 0, what=what, log=log, within_seconds=_WITHIN_SECONDS)


def verdicts(found: Deployment, broker: psycopg.Connection, paid: int) -> list[Verdict]:
    """Both versions were published, each order has one message, and old and new code met."""
    keys = keys_by_version(broker)
    first, second = keys.get("1", []), keys.get("2", [])
    return [
        some("orders published as version 1", len(first)),
        some("orders published as version 2", len(second)),
        exactly("orders with one message of a version", len({*first, *second}), len(first) + len(second)),
        exactly("messages of both versions", len(first) + len(second), paid),
        some("groups in which version 2 waited", found.waiting_groups),
        some("version 1 handled by new code", found.converted),
    ]
