"""Statements that idle processes send to the database: per heartbeat, not per second."""

from __future__ import annotations

import contextlib
import uuid

from outbox.broker.consumer.coordinator import Coordinator
from outbox.broker.consumer.owned_queue import ConsumingGroup, Ownership
from outbox.broker.database.executor import Executor
from outbox.broker.groups import registration
from outbox.broker.operations import summary
from outbox.subscription import Subscription
from tests.broker.bench import ConsumptionBench
from tests.round_trips import counted

# Nothing is renewed within a test.
LONG_SECONDS = 3600.0


def test_a_beat_of_a_consumer_with_three_groups_is_one_statement(bench: ConsumptionBench) -> None:
    bench.declare("orders")
    run = Executor(bench.connection, bench.database.schema)
    instance = uuid.uuid4()
    groups = []
    for name in ("points", "mails", "stock"):
        subscription = Subscription(topic="orders", group=name)
        ids = registration.register(run, subscription, instance=instance)
        group = ConsumingGroup(ids.group_id, name, broadcast=False)
        group.subscribe(subscription, lambda _: None, ids.topic_id)
        groups.append(group)
    ownership = Ownership(lambda: None)
    coordinator = Coordinator(bench.database, instance, groups, ownership, lease_seconds=LONG_SECONDS)
    for _ in range(6):
        # Then psycopg has prepared what is executed often.
        coordinator.run_once()
    with counted(coordinator._connected()) as round_trips:
        for _ in range(5):
            coordinator.run_once()
        assert round_trips() == 5
    ownership.is_draining = True
    coordinator.stop()


def test_a_summary_is_four_statements(bench: ConsumptionBench) -> None:
    """The transaction's beginning and its end, the counts, and what is stored."""
    bench.declare("orders")
    with (
        contextlib.closing(bench.database.open()) as connection,
        counted(connection) as round_trips,
    ):
        summary.refresh(Executor(connection, bench.database.schema))
        assert round_trips() == 4
