"""Every fault an operator should learn of, made for real; what each is called stands in outbox's catalogue."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from django.db import connections, transaction

from outbox import Delivery
from outbox.broker.database.executor import Executor
from outbox.broker.groups.registration import register
from outbox.broker.maintenance import retention
from outbox.broker.maintenance.retention import RetentionSettings
from outbox.broker.operations import audit, summary, switches
from outbox.broker.sequencer.leader import LeaderLease
from outbox.broker.transaction import checks
from outbox.contrib.django import publish, subscriber
from outbox.contrib.django.broker import flusher, get_broker
from outbox.contrib.django.conf import get_settings
from outbox.contrib.django.databases import alias_conninfo, broker_database
from outbox.contrib.django.periodic import run_check_back
from outbox.contrib.django.workers import consumer_runtime
from outbox.errors import PermanentError, WrongDatabase
from outbox.subscription import Subscription
from outbox.transaction import Answer, Decision, EndTransaction
from tests.django.conftest import point_alias
from tests.django.state import rolled_back
from tests.django.support import sequence
from tests.support import eventually

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
        assert LeaderLease("outbox", uuid4(), term_seconds=600).hold(self.broker) == 0.0

    def limits(self, **pairs: Sequence[float | None]) -> None:
        """Change thresholds."""
        self.change_settings(THRESHOLDS=pairs)

    def subscribe(self, group: str = "effects", topic: str = "orders") -> None:
        """A group that is known, and of which nobody runs."""
        register(self.run, Subscription(topic=topic, group=group))

    def publish(self, count: int = 1, topic: str = "orders") -> None:
        """Committed and queued messages."""
        for number in range(count):
            publish(topic, {}, key=f"k{number}")
        sequence()

    def age(self, seconds: float) -> None:
        """Let what is stored be older than it is."""
        for table, columns in (
            ("commit_log", ["stored_at"]),
            ("op_log", ["decided_at"]),
            ("pending_check", ["stored_at", "due_at", "immune_until"]),
        ):
            moved = ", ".join(f"{column} = {column} - make_interval(secs => {seconds})" for column in columns)
            self.sql(f"UPDATE outbox.{table} SET {moved}")

    def half(self) -> None:
        """A transaction that nobody decided and whose producer is gone."""
        with rolled_back():
            publish("orders", {}, key="half")
        flusher.flush(within_seconds=5)
        checks.scan(self.run, settings=get_settings().check)
        self.sql("UPDATE outbox.pending_check SET due_at = now(), immune_until = now()")


Fault = Callable[[World], None]
FAULTS: dict[str, Fault] = {}


def fault(inject: Fault) -> Fault:
    FAULTS[inject.__name__] = inject
    return inject


@fault
def unreachable(world: World) -> None:
    point_alias("broker", NOWHERE)


@fault
def schema_version(world: World) -> None:
    world.sql("UPDATE outbox.schema_version SET change = 1")


@fault
def no_sequencer(world: World) -> None:
    world.sql("UPDATE outbox.leader_lease SET expires_at = now()")


@fault
def ticks_late(world: World) -> None:
    publish("orders", {}, key="unread")
    flusher.flush(within_seconds=5)
    world.age(30)


@fault
def summary_late(world: World) -> None:
    summary.refresh(world.run)
    world.sql("UPDATE outbox.summary SET at = at - interval '1 hour'")


@fault
def check_back_late(world: World) -> None:
    world.sql("INSERT INTO outbox.periodic_pass VALUES ('shop', 'check_back', 30, now() - interval '5 minutes')")


@fault
def unanswered(world: World) -> None:
    world.half()
    world.age(300)


@fault
def parked(world: World) -> None:
    world.change_settings(MAX_CHECKS=1)
    world.half()
    claimed = get_broker().claim_checks("shop")
    answers = [Answer(transaction_id=one.transaction_id, decision=Decision.UNKNOWN) for one in claimed]
    get_broker().report_answers("shop", answers)


@fault
def contradicted(world: World) -> None:
    world.half()
    [(transaction_id,)] = world.sql("SELECT transaction_id FROM outbox.pending_check")
    for decision in (Decision.COMMIT, Decision.ROLLBACK):
        get_broker().end([EndTransaction(transaction_id=transaction_id, decision=decision, producer_group="shop")])


@fault
def refused(world: World) -> None:
    get_broker().end([EndTransaction(transaction_id=uuid4(), decision=Decision.COMMIT, producer_group="shop")])


@fault
def wrong_ledger(world: World) -> None:
    world.half()
    with connections["default"].cursor() as cursor:
        cursor.execute("TRUNCATE outbox_ledger")
    run_check_back()


@fault
def checker_disagrees(world: World) -> None:
    world.half()
    [check] = get_broker().claim_checks("shop")
    said = Answer(transaction_id=check.transaction_id, decision=Decision.ROLLBACK, detail="look-up: True", alarm=True)
    get_broker().report_answers("shop", [said])


@fault
def no_worker(world: World) -> None:
    world.subscribe()
    world.publish()


@fault
def lag(world: World) -> None:
    world.subscribe()
    world.publish(3)
    world.age(120)


@fault
def blocked_queue(world: World) -> None:
    @subscriber("payments", group="strict", mode="orderly")
    def strict(delivery: Delivery) -> None:
        raise ValueError("out of order")

    world.subscribe("strict", "payments")
    world.publish(1, "payments")
    stop = threading.Event()
    thread = threading.Thread(target=consumer_runtime(groups=["strict"]).run, args=[stop])
    thread.start()
    try:
        eventually(lambda: world.sql("SELECT 1 FROM outbox.failure"), what="the first failure")
    finally:
        stop.set()
        thread.join(20)


@fault
def stopped_queue(world: World) -> None:
    @subscriber("payments", group="strict", mode="orderly", on_error={ValueError: "stop"})
    def strict(delivery: Delivery) -> None:
        raise ValueError("out of order")

    world.publish(1, "payments")
    consumer_runtime(groups=["strict"]).run_once()


@fault
def group_paused(world: World) -> None:
    world.subscribe()
    switches.pause(world.run, "effects")
    world.publish()


# As the schema's change about suspects makes them.
SUSPECTS = """
CREATE TABLE IF NOT EXISTS outbox.suspect (
    group_id integer NOT NULL, log_id bigint NOT NULL, call_size integer NOT NULL, deaths integer NOT NULL DEFAULT 0,
    hung boolean NOT NULL, evidence text NOT NULL, suspected_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (group_id, log_id)
);
CREATE TABLE IF NOT EXISTS outbox.outage (
    instance_id uuid NOT NULL, group_id integer NOT NULL, topic_id integer NOT NULL, error text NOT NULL,
    since timestamptz NOT NULL DEFAULT clock_timestamp(), seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (instance_id, group_id, topic_id)
);
"""


def suspect(world: World, *, hung: bool) -> None:
    world.subscribe()
    world.publish()
    world.sql(SUSPECTS)
    world.sql(
        "INSERT INTO outbox.suspect (group_id, log_id, call_size, hung, evidence)"
        " SELECT group_id, log_id, 1, %s, 'ended by signal 9' FROM outbox.consumer_group, outbox.commit_log",
        hung,
    )


@fault
def crash_loop(world: World) -> None:
    suspect(world, hung=False)


@fault
def hung_handlers(world: World) -> None:
    suspect(world, hung=True)


@fault
def outage(world: World) -> None:
    world.subscribe()
    world.sql(SUSPECTS)
    world.sql(
        "INSERT INTO outbox.outage (instance_id, group_id, topic_id, error)"
        " SELECT gen_random_uuid(), group_id, topic_id, 'ConnectionError: shipping' FROM outbox.subscription"
    )


@fault
def dead_letters(world: World) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        raise PermanentError("cannot ever work")

    world.publish()
    consumer_runtime(groups=["effects"]).run_once()


@fault
def retry_storm(world: World) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        raise ConnectionError("the shipping service is down")

    world.subscribe()
    summary.refresh(world.run)
    world.sql("UPDATE outbox.summary SET at = at - interval '90 seconds'")
    world.publish(120)
    consumer_runtime(groups=["effects"]).run_once()
    summary.refresh(world.run)


@fault
def retention_behind(world: World) -> None:
    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        pass

    world.publish(20)
    consumer_runtime(groups=["effects"]).run_once()
    world.age(5 * 24 * 3600)


@fault
def expired(world: World) -> None:
    world.subscribe()
    world.publish()
    world.age(40 * 24 * 3600)
    assert retention.run_once(world.run, settings=RetentionSettings(hard_cap_seconds=1)).expired


@fault
def transaction_open(world: World) -> None:
    world.limits(TRANSACTION_SECONDS=(0, None))
    session = world.session("a report")
    session.execute("BEGIN")
    session.execute("SELECT pg_current_xact_id()")


@fault
def lock_held(world: World) -> None:
    """A table is locked as by a migration: readers are kept out too."""
    session = world.session("a migration")
    session.execute("BEGIN")
    session.execute("LOCK TABLE outbox.consumer_group IN ACCESS EXCLUSIVE MODE")


@fault
def open_since_resync(world: World) -> None:
    session = world.session("a forgotten one")
    session.execute("BEGIN")
    session.execute("INSERT INTO outbox.op_log (transaction_id, decision, decided_by, log_ids)"
                    " VALUES (gen_random_uuid(), 'R', 'P', '{}')")  # fmt: skip
    world.sql("SELECT pg_current_xact_id()")
    world.sql("INSERT INTO outbox.resync VALUES (2, 'restored', pg_current_snapshot())")


@fault
def space(world: World) -> None:
    world.limits(SPACE_BYTES=(1, None))


@fault
def xid_age(world: World) -> None:
    world.limits(XID_AGE=(1, None))


@fault
def sequence_age(world: World) -> None:
    world.sql("SELECT setval(pg_get_serial_sequence('outbox.queue', 'queue_id'), 2000000000)")


@fault
def replica_lag(world: World) -> None:
    world.limits(REPLICA_LAG_BYTES=(0, None))
    name = f"gone_{uuid4().hex}"
    world.sql("SELECT pg_create_physical_replication_slot(%s, true)", name)
    world.stack.callback(world.sql, "SELECT pg_drop_replication_slot(%s)", name)


@fault
def path_flipped(world: World) -> None:
    world.change_settings(PATH="atomic")
    with pytest.raises(WrongDatabase), transaction.atomic():
        publish("orders", {})


@fault
def not_conserved(world: World) -> None:
    world.publish(2)
    world.sql("DELETE FROM outbox.consume_queue WHERE log_id = (SELECT min(log_id) FROM outbox.consume_queue)")
    assert audit.run_once(world.run).differences


@fault
def rejecting(world: World) -> None:
    world.sql("UPDATE outbox.broker SET reject_transactional = true")


@contextlib.contextmanager
def new_world(change_settings: Callable[..., None]) -> Iterator[World]:
    """A broker that somebody leads, and nothing else."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(closing(broker_database().connect(name="test")))
        world = World(connection, stack, change_settings)
        world.lead()
        yield world
