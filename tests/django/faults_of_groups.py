"""Faults of consumer groups, made for real; each is named as its condition."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psycopg
from django.db import IntegrityError

from outbox import Delivery, RetryPolicy
from outbox.broker import deaths
from outbox.broker.consumer.running_calls import LastCalls
from outbox.broker.groups.quarantine import RunningCall
from outbox.broker.maintenance import retention
from outbox.broker.maintenance.retention import RetentionSettings
from outbox.broker.operations import changes, summary
from outbox.broker.supervisor import ChildDeath
from outbox.contrib.django import publish, run_prune, subscriber
from outbox.contrib.django.database.aliases import broker_database
from outbox.contrib.django.models import InboxEntry
from outbox.contrib.django.operations.comparing import run_compare
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import PermanentError
from tests.django.broker_world import World, fault
from tests.django.processes import process
from tests.django.support import sequence
from tests.support import eventually


@fault("critical", storms=("away", "deaths"), seconds=45)
def no_worker(world: World) -> None:
    """Messages wait for a subscribed group, but the group has no process."""
    world.subscribe()
    world.publish()


@fault("warning", storms=("away", "deaths"), seconds=120)
def lag(world: World) -> None:
    """Messages wait for two minutes."""
    world.subscribe()
    world.publish(3)
    world.age(120)


@fault("critical")
def topic_limit(world: World) -> None:
    """A group is further behind than the topic allows, so the topic takes no messages."""
    world.sql("UPDATE outbox.topic SET backlog_limit = 2 WHERE name = 'orders'")
    world.subscribe()
    world.publish(3)


@fault("critical", storms=("away", "deaths"), seconds=120)
def blocked_queue(world: World) -> None:
    """An ordered handler fails on the same message again and again."""

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


@fault("critical")
def stopped_queue(world: World) -> None:
    """A handler's policy stops its queue."""

    @subscriber("payments", group="strict", mode="orderly", on_error={ValueError: "stop"})
    def strict(delivery: Delivery) -> None:
        raise ValueError("out of order")

    world.publish(1, "payments")
    consumer_runtime(groups=["strict"]).run_once()


@fault("warning")
def group_paused(world: World) -> None:
    """An operator pauses a group and does not resume it."""
    world.subscribe()
    changes.pause(world.run, "effects")
    world.publish()


def kill(world: World, until: str) -> None:
    """A message kills the consumer process of a real worker, which starts another one, until a row says so."""
    publish("orders", {}, key="kills-1", at_once=True)
    sequence()
    with process(["-m", "django", "outbox_worker"], quiet=True):
        eventually(lambda: world.sql(until), within_seconds=120, what="the deaths of consumer processes")


@fault("critical", storms=("away", "deaths"), seconds=700)
def crash_loop(world: World) -> None:
    """A process dies three times in ten minutes."""
    kill(world, "SELECT 1 FROM outbox.incident WHERE kind = 'process_died' HAVING count(*) >= 3")


@fault("critical", storms=("deaths", "crash of the server"), seconds=300)
def quarantined(world: World) -> None:
    """A message kills the process that handles it."""
    # Once among others, once alone; the third death alone would end it, seconds later.
    kill(world, "SELECT 1 FROM outbox.quarantined_message WHERE deaths > 0")


@fault("warning")
def hung_handlers(world: World) -> None:
    """A handler never returns."""
    world.subscribe()
    world.publish()
    [(group_id, log_id)] = world.sql("SELECT group_id, log_id FROM outbox.consumer_group, outbox.commit_log")
    left = LastCalls(instance=uuid4(), told_to_stop=False, calls=[RunningCall(group_id, [log_id], alone=False)])
    # The supervisor's reaction to such an end; broker/consumer/test_quarantine.py has processes that hang.
    deaths.record(broker_database(), ChildDeath(child="consumer-1", how="exit code 3", hung=True, left_behind=left))


@fault("warning", storms=("away",), seconds=120)
def outage(world: World) -> None:
    """A service that a handler needs is down."""

    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        raise ConnectionError("the shipping service is down")

    world.publish(8)
    stop = threading.Event()
    thread = threading.Thread(target=consumer_runtime(groups=["effects"]).run, args=[stop])
    thread.start()
    world.stack.callback(thread.join, 20)
    world.stack.callback(stop.set)
    eventually(lambda: world.sql("SELECT 1 FROM outbox.outage"), within_seconds=60, what="the pause")


@fault("critical", storms=("away",), seconds=90)
def connections_refused(world: World) -> None:
    """The handlers need a database whose role may open no further connection."""
    role = f"full_{os.getpid()}"
    world.sql(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 0")
    world.stack.callback(world.sql, f"DROP ROLE {role}")

    @subscriber("orders", group="effects", idempotent=False)
    def effect(delivery: Delivery) -> None:
        psycopg.connect(broker_database().conninfo, user=role)

    world.publish(3)
    stop = threading.Event()
    thread = threading.Thread(target=consumer_runtime(groups=["effects"]).run, args=[stop])
    thread.start()
    world.stack.callback(thread.join, 20)
    world.stack.callback(stop.set)
    eventually(lambda: world.sql("SELECT 1 FROM outbox.outage"), within_seconds=60, what="the pause")
    assert world.sql("SELECT count(*) FROM outbox.failure") == [(0,)], "no attempt was used up"


@fault("warning")
def dead_letters(world: World) -> None:
    """A handler fails for good, and its message becomes a dead letter."""

    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        raise PermanentError("cannot ever work")

    world.publish()
    consumer_runtime(groups=["effects"]).run_once()


@fault("critical", storms=("away",), seconds=600)
def retry_storm(world: World) -> None:
    """A handler fails on every message, and each message is sent back for another attempt."""

    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        raise ConnectionError(f"the shipping service is down for {delivery.message_id}")

    world.subscribe()
    summary.refresh(world.run)
    world.sql("UPDATE outbox.summary SET at = at - interval '90 seconds'")
    world.publish(120)
    consumer_runtime(groups=["effects"]).run_once()
    summary.refresh(world.run)


@fault("warning")
def failing_messages(world: World) -> None:
    """A constraint refuses some messages, attempt after attempt."""

    @subscriber("orders", group="effects", retry=RetryPolicy(delays_seconds=[0.0, 3600.0]))
    def effect(delivery: Delivery) -> None:
        raise IntegrityError('new row violates check constraint "has_address"')

    world.publish(3)
    for _ in range(2):
        consumer_runtime(groups=["effects"]).run_once()
        sequence()


@fault("critical")
def retention_behind(world: World) -> None:
    """No process removes old consumed messages."""

    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        pass

    world.publish(20)
    consumer_runtime(groups=["effects"]).run_once()
    world.age(5 * 24 * 3600)


@fault("warning")
def pruning_behind(world: World) -> None:
    """The ledgers and inboxes of a service were last pruned two days ago."""
    run_prune(now=datetime.now(UTC) - timedelta(days=2))


@fault("critical")
def expired(world: World) -> None:
    """A group does not run for a longer time than messages are kept."""
    world.subscribe()
    world.publish()
    world.age(40 * 24 * 3600)
    assert retention.run_once(world.run, settings=RetentionSettings(hard_cap_seconds=1)).expired


@fault("critical")
def lost_effects(world: World) -> None:
    """The handlers' database is restored to a time before a message was handled."""

    @subscriber("payments", group="effects")
    def effect(delivery: Delivery) -> None:
        pass

    world.publish(3, "payments")
    consumer_runtime(groups=["effects"]).run_once()
    assert run_compare().lost_effects == 0
    newest = InboxEntry.objects.order_by("-handled_at").values_list("message_id", flat=True)[:2]
    InboxEntry.objects.filter(message_id__in=list(newest)).delete()
    assert run_compare().lost_effects == 2
