"""Faults of consumer groups, made for real; each is named as its condition."""

from __future__ import annotations

import threading
from uuid import uuid4

from outbox import Delivery
from outbox.broker.log import incidents
from outbox.broker.log.incidents import Incident
from outbox.broker.maintenance import retention
from outbox.broker.maintenance.retention import RetentionSettings
from outbox.broker.operations import summary, switches
from outbox.contrib.django import subscriber
from outbox.contrib.django.workers import consumer_runtime
from outbox.errors import PermanentError
from tests.django.broker_world import World, fault
from tests.support import eventually


@fault
def no_worker(world: World) -> None:
    """A subscribed group has messages and no process."""
    world.subscribe()
    world.publish()


@fault
def lag(world: World) -> None:
    """Messages wait for two minutes."""
    world.subscribe()
    world.publish(3)
    world.age(120)


@fault
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


@fault
def stopped_queue(world: World) -> None:
    """A handler's policy stops its queue."""

    @subscriber("payments", group="strict", mode="orderly", on_error={ValueError: "stop"})
    def strict(delivery: Delivery) -> None:
        raise ValueError("out of order")

    world.publish(1, "payments")
    consumer_runtime(groups=["strict"]).run_once()


@fault
def group_paused(world: World) -> None:
    """An operator pauses a group and forgets it."""
    world.subscribe()
    switches.pause(world.run, "effects")
    world.publish()


def suspect(world: World, *, hung: bool) -> None:
    world.subscribe()
    world.publish()
    world.sql(
        "INSERT INTO outbox.suspect (group_id, log_id, call_size, hung, evidence)"
        " SELECT group_id, log_id, 1, %s, 'ended by signal 9' FROM outbox.consumer_group, outbox.commit_log",
        hung,
    )


@fault
def crash_loop(world: World) -> None:
    """A process dies three times in ten minutes."""
    died = [("process_died", "consumer-1 on host", "was ended by signal 9")] * 3
    incidents.record(world.run, [Incident(*one) for one in died])


@fault
def suspects(world: World) -> None:
    """A message kills the process that handles it."""
    suspect(world, hung=False)


@fault
def hung_handlers(world: World) -> None:
    """A handler never returns."""
    suspect(world, hung=True)


@fault
def outage(world: World) -> None:
    """What a handler needs is away."""
    world.subscribe()
    alive = uuid4()
    world.sql(
        "INSERT INTO outbox.consumer (instance_id, group_id, topics, host, pid, expires_at)"
        " SELECT %s, group_id, ARRAY['orders'], 'host', 1, now() + interval '1 minute' FROM outbox.consumer_group",
        alive,
    )
    world.sql(
        "INSERT INTO outbox.outage (instance_id, group_id, topic_id, error)"
        " SELECT %s, group_id, topic_id, 'ConnectionError: shipping' FROM outbox.subscription",
        alive,
    )


@fault
def dead_letters(world: World) -> None:
    """A handler gives a message up."""

    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        raise PermanentError("cannot ever work")

    world.publish()
    consumer_runtime(groups=["effects"]).run_once()


@fault
def retry_storm(world: World) -> None:
    """A handler fails on everything, and all of it is sent back."""

    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        raise ConnectionError(f"the shipping service is down for {delivery.message_id}")

    world.subscribe()
    summary.refresh(world.run)
    world.sql("UPDATE outbox.summary SET at = at - interval '90 seconds'")
    world.publish(120)
    consumer_runtime(groups=["effects"]).run_once()
    summary.refresh(world.run)


@fault
def retention_behind(world: World) -> None:
    """Nothing removes what is consumed and old."""

    @subscriber("orders", group="effects")
    def effect(delivery: Delivery) -> None:
        pass

    world.publish(20)
    consumer_runtime(groups=["effects"]).run_once()
    world.age(5 * 24 * 3600)


@fault
def expired(world: World) -> None:
    """A group is away for longer than messages are kept."""
    world.subscribe()
    world.publish()
    world.age(40 * 24 * 3600)
    assert retention.run_once(world.run, settings=RetentionSettings(hard_cap_seconds=1)).expired
