"""A Django project on RocketMQ: its processes, and what has to be true of its orders and effects."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from outbox.rocketmq.admin import Admin
from outbox.subscription import Subscription
from outbox.topic import MessageType, Topic
from tests.django import processes
from tests.django.shop.models import Effect, Order
from tests.rocketmq.conftest import unique
from tests.rocketmq.topics import declared
from tests.support import eventually


class Server(Protocol):
    """A server or a cluster."""

    @property
    def url(self) -> str:
        """The value of OUTBOX['BROKER'] for it."""

    @property
    def admins(self) -> list[Admin]:
        """The administration ports of its brokers."""


@dataclass(frozen=True)
class Project:
    """One project of this test's own: `topics` are orders, steps and what is delivered later; `more` variables."""

    server: Server
    topics: tuple[str, str, str]
    group: str
    on_postgres: bool = False
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def outbox(self) -> Mapping[str, Any]:
        """OUTBOX for a producer in this process."""
        return {
            "BROKER": "broker" if self.on_postgres else self.server.url,
            "PRODUCER_GROUP": "shop",
            "TOPICS": declared(self.topics),
            "IMMUNITY_SECONDS": 0,
            "SEND_TIMEOUT_SECONDS": 20,
        }

    def environment(self) -> dict[str, str]:
        """The variables of its processes, in addition to those of every Django process."""
        return {
            "DJANGO_SETTINGS_MODULE": "tests.rocketmq.worker_settings",
            "TEST_ROCKETMQ": "" if self.on_postgres else self.server.url,
            "TEST_TOPICS": ",".join(self.topics),
            "TEST_GROUP": self.group,
            **self.more,
        }

    @contextmanager
    def running(
        self, arguments: Sequence[str], *, faults: str = "", quiet: bool = True, log: Path | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """A Python process of the project."""
        variables = self.environment()
        with processes.process(arguments, faults=faults, quiet=quiet, log=log, variables=variables) as started:
            yield started

    @contextmanager
    def consumer(self) -> Iterator[subprocess.Popen[str]]:
        """A consumer process."""
        with self.running(["-m", "outbox.contrib.django.worker.child", "consumer"]) as started:
            yield started

    def produced(self, prefixes: Mapping[str, str], how: str = "plain", *, rounds: int = 3) -> dict[str, int]:
        """Run drivers side by side, one per prefix with its faults; how each ended."""
        with ExitStack() as stack:
            arguments = {prefix: ["-m", "tests.rocketmq.driver", prefix, how, str(rounds)] for prefix in prefixes}
            started = {
                prefix: stack.enter_context(self.running(arguments[prefix], faults=faults))
                for prefix, faults in prefixes.items()
            }
            return {prefix: one.wait(120) for prefix, one in started.items()}


def make_project(server: Server) -> Project:
    """Create its topics and its group on the server."""
    project = Project(server, (unique("orders."), unique("steps."), unique("later.")), unique("effects"))
    for name, options in declared(project.topics).items():
        kinds = frozenset(map(MessageType, options.get("types", ["NORMAL", "TRANSACTION"])))
        topic = Topic(name=name, queue_count=2, types=kinds)
        for admin in server.admins:
            admin.create_topic(topic)
            admin.create_group(Subscription(group=project.group, topic=name), topic)
    return project


def expected() -> Counter[str]:
    """The expected effects: one for every committed order, and one for its step."""
    numbers = list(Order.objects.values_list("number", flat=True))
    return Counter([*numbers, *(f"step-{number}" for number in numbers)])


def happened() -> Counter[str]:
    """The stored effects."""
    return Counter(Effect.objects.values_list("number", flat=True))


def nothing_lost_invented_or_doubled(*, within_seconds: float = 120.0) -> None:
    """Every committed order has had its effects once, and nothing else has had any."""
    eventually(
        lambda: set(expected()) <= set(happened()),
        within_seconds=within_seconds,
        what=lambda: f"lost: {sorted(set(expected()) - set(happened()))}",
    )
    assert happened() == expected()
