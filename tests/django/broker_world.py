"""A fresh broker with a leader, and the faults that tests cause in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

import psycopg

from outbox.broker.database.executor import Executor
from outbox.broker.groups.registration import register
from outbox.broker.sequencer.leader_lease import LeaderLease
from outbox.broker.transaction import checks
from outbox.contrib.django import publish
from outbox.contrib.django.database.aliases import alias_conninfo, broker_database
from outbox.contrib.django.engine.broker import flush, reset_broker
from outbox.contrib.django.settings.conf import get_settings
from outbox.subscription import Subscription
from tests.django.conftest import point_alias
from tests.django.state import rolled_back
from tests.django.support import sequence

NOWHERE = "postgresql://nobody@127.0.0.1:9/nothing"


@dataclass(frozen=True)
class World:
    """A fresh broker, a connection to it, and what faults need around it."""

    broker: psycopg.Connection[Any]
    stack: contextlib.ExitStack
    change_settings: Callable[..., None]

    @property
    def run(self) -> Executor:
        return Executor(self.broker, "outbox")

    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        cursor = self.broker.execute(statement.encode(), parameters or None)
        return cursor.fetchall() if cursor.description else []

    def session(self, name: str) -> psycopg.Connection[Any]:
        """Another session, closed with the test."""
        return self.stack.enter_context(
            psycopg.connect(alias_conninfo("broker"), autocommit=True, application_name=name)
        )

    def lead(self) -> None:
        """Hold the leader's lease, as a broker process does, without sequencing."""
        assert LeaderLease("outbox", uuid4(), term_seconds=600).acquire_or_renew(self.broker) == 0.0

    def limits(self, **pairs: Sequence[float | None]) -> None:
        """Change thresholds."""
        self.change_settings(THRESHOLDS=pairs)

    def subscribe(self, group: str = "effects", topic: str = "orders") -> None:
        """A registered group without a running process."""
        register(self.run, Subscription(topic=topic, group=group))

    def publish(self, count: int = 1, topic: str = "orders") -> None:
        """Committed and queued messages."""
        for number in range(count):
            publish(topic, {}, key=f"k{number}", at_once=True)
        sequence()

    def age(self, seconds: float) -> None:
        """Let what is stored be older than it is."""
        for table, columns in (
            ("commit_log", ["stored_at"]),
            ("op_log", ["decided_at"]),
            ("consume_queue", ["queued_at"]),
            ("pending_check", ["stored_at", "due_at", "immune_until"]),
        ):
            moved = ", ".join(f"{column} = {column} - make_interval(secs => {seconds})" for column in columns)
            self.sql(f"UPDATE outbox.{table} SET {moved}")

    def half(self) -> None:
        """An undecided transaction whose producer is gone."""
        with rolled_back():
            publish("orders", {}, key="half")
        flush(within_seconds=5)
        checks.scan(self.run, settings=get_settings().check)
        self.sql("UPDATE outbox.pending_check SET due_at = now(), immune_until = now()")


@contextlib.contextmanager
def new_world(change_settings: Callable[..., None]) -> Iterator[World]:
    """A broker with a leader, and without any message."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(closing(broker_database().connect(name="test")))
        world = World(connection, stack, change_settings)
        world.lead()
        yield world


Fault = Callable[[World], None]
FAULTS: dict[str, Fault] = {}
# What the status says of each.
SEVERITIES: dict[str, str] = {}


def fault(
    severity: Literal["warning", "critical"], *, storms: Sequence[str] = (), seconds: float = 0
) -> Callable[[Fault], Fault]:
    """Declare a fault that causes the condition of its name, with this severity.

    `storms`: what may cause the condition in a storm, too, and `seconds`: for how long after that. The checker of the
    storms reads both (`tests/oracle/checker.py`), so they are literals.
    """
    assert bool(storms) == bool(seconds)

    def add(inject: Fault) -> Fault:
        FAULTS[inject.__name__] = inject
        SEVERITIES[inject.__name__] = severity
        return inject

    return add


@contextlib.contextmanager
def away(alias: str) -> Iterator[None]:
    """No server answers for this alias."""
    url = alias_conninfo(alias)
    point_alias(alias, NOWHERE)
    reset_broker()
    try:
        yield
    finally:
        point_alias(alias, url)
        reset_broker()
