"""A project whose messages go through the relay: its processes, what it commits, and what RocketMQ got."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from subprocess import Popen
from typing import Any

from django.db import connections, transaction

from outbox.contrib.django import publish
from outbox.message import Delivery
from outbox.retry import RetryPolicy
from outbox.subscription import Mode, Subscription
from outbox.topic import MessageType, Topic
from tests.django import processes
from tests.django.shop.models import Effect, Order
from tests.rocketmq.conftest import unique
from tests.rocketmq.test_engine import consuming
from tests.rocketmq.topics import LATER, STEPS, relayed
from tests.rocketmq_server import PrivateRocketMQ


class Undone(Exception):
    """Rolls a transaction back."""


@dataclass(frozen=True)
class RelayProject:
    """One project of this test's own."""

    server: PrivateRocketMQ
    steps: Topic
    later: Topic
    group: str

    @property
    def outbox(self) -> Mapping[str, Any]:
        """OUTBOX for a producer in this process."""
        return relayed(self.server.url, self.steps.name, self.later.name)

    @contextmanager
    def running(self, role: str, *, faults: str = "", quiet: bool = True) -> Iterator[Popen[str]]:
        """A process of the worker."""
        variables = {
            "DJANGO_SETTINGS_MODULE": "tests.rocketmq.relay_settings",
            "TEST_ROCKETMQ": self.server.url,
            "TEST_TOPICS": f"{self.steps.name},{self.later.name}",
            "TEST_GROUP": self.group,
        }
        arguments = ["-m", "outbox.contrib.django.worker.child", role]
        with processes.process(arguments, faults=faults, quiet=quiet, variables=variables) as started:
            yield started

    def commit(self, key: str, number: str, *, fail: bool = False) -> None:
        """An order and its message. The row of the order gets its number while the transaction holds the key."""
        with suppress(Undone), transaction.atomic():
            publish(self.steps.name, number, key=key)
            Order.objects.create(number=number, status=key)
            if fail:
                raise Undone

    def committed(self) -> dict[str, list[str]]:
        """The numbers of the committed orders by key, in the order of their commits."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for key, number in Order.objects.order_by("pk").values_list("status", "number"):
            found[key].append(number)
        return dict(found)

    def effects(self) -> list[str]:
        """The effects in the order in which the handlers committed them."""
        return list(Effect.objects.order_by("pk").values_list("number", flat=True))


def make_relay_project(server: PrivateRocketMQ) -> RelayProject:
    """Create its topics and groups on the server."""
    steps = Topic(name=unique("steps."), types=frozenset(map(MessageType, STEPS)), queue_count=2)
    later = Topic(name=unique("later."), types=frozenset(map(MessageType, LATER)), queue_count=2)
    project = RelayProject(server, steps, later, unique("effects"))
    for topic, group, mode in (
        (steps, project.group, Mode.ORDERLY),
        (later, f"{project.group}-later", Mode.CONCURRENT),
    ):
        server.admin.create_topic(topic)
        server.admin.create_group(Subscription(group=group, topic=topic.name, mode=mode), topic)
    return project


@dataclass
class Seen:
    """What RocketMQ stored on the topic of the steps, with every duplicate: bodies by key, in order."""

    by_key: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def note(self, delivery: Delivery) -> None:
        """The handler of a consumer without an inbox."""
        self.by_key[delivery.key].append(delivery.body)

    def first(self) -> dict[str, list[str]]:
        """The bodies by key without the duplicates."""
        return {key: list(dict.fromkeys(bodies)) for key, bodies in self.by_key.items()}

    def duplicates(self) -> int:
        """The number of messages that RocketMQ stored again."""
        return sum(len(bodies) - len(set(bodies)) for bodies in self.by_key.values())


@contextmanager
def watching(project: RelayProject) -> Iterator[Seen]:
    """Consume the topic of the steps without an inbox."""
    seen = Seen()
    # A killed server may forget an acknowledgement: the queue of a FIFO topic then waits for this timeout.
    options: dict[str, Any] = {"mode": Mode.ORDERLY, "retry": RetryPolicy(delays_seconds=[1]), "timeout_seconds": 10}
    with consuming(project.server, project.steps, seen.note, **options):
        yield seen


def in_threads(work: Sequence[Any]) -> None:
    """Run functions side by side, each with database connections of its own. Raises the first error."""

    def run(function: Any) -> None:
        try:
            function()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(work)) as pool:
        list(pool.map(run, work))
