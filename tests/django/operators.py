"""Operators, and messages in the states that they look for."""

from __future__ import annotations

from typing import Final
from uuid import UUID, uuid4

from django.contrib.auth.models import Permission, User
from django.test import Client

from outbox.broker.database.executor import Executor
from outbox.broker.groups import members
from outbox.broker.groups.members import CallReport, CallsReport
from outbox.broker.groups.registration import ensure_retry_queue, register
from outbox.broker.operations import dead_letters
from outbox.contrib.django import publish
from outbox.contrib.django.actions.declaration import DeclaredAction, FieldKind
from outbox.contrib.django.actions.listing import Listing
from outbox.subscription import Mode, Subscription
from tests.django.broker_world import World
from tests.django.support import sequence

ALL: Final = ("view_operations", "act", "view_bodies")


def make_user(*permissions: str, staff: bool = True) -> User:
    """Staff with these permissions."""
    user = User.objects.create_user(f"user-{uuid4().hex[:8]}", is_staff=staff)
    found = Permission.objects.filter(content_type__app_label="outbox", codename__in=permissions)
    assert len(found) == len(permissions)
    user.user_permissions.set(found)
    return user


def client_of(user: User | None, *, csrf: bool = False) -> Client:
    """A client that is logged in; None: an anonymous one."""
    client = Client(enforce_csrf_checks=csrf)
    if user is not None:
        client.force_login(user)
    return client


_SAMPLES: Final = {
    FieldKind.ID: "019aa000-0000-7000-8000-000000000000",
    FieldKind.TIME: "2026-01-31T08:00:00+00:00",
    FieldKind.PLACE: "2026-01-31T08:00:00+00:00/1",
}


def command_of(declared: Listing | DeclaredAction, group: str) -> list[str]:
    """The command line of a listing or an action, with a value for each field that it needs."""
    given = {"group": group, "topic": "orders"}
    line, chosen = declared.command.split(), {""}
    for field in declared.fields:
        # The messages of the broker need a topic or a key.
        if field.required or field.one_of not in chosen or (declared.name, field.name) == ("messages", "topic"):
            chosen.add(field.one_of)
            line += [] if field.positional else [f"--{field.name.replace('_', '-')}"]
            numbers = field.kind in (FieldKind.NUMBER, FieldKind.COUNT, FieldKind.SECONDS)
            sample = _SAMPLES.get(field.kind) or ("1" if numbers else next(iter(field.choices), "nothing"))
            line += [] if field.kind is FieldKind.FLAG else [given.get(field.name, sample)]
    return line if isinstance(declared, Listing) else [*line, "--no-input"]


def bury(world: World, group: str, key: str, error: str, topic: str = "orders") -> None:
    """Make a queued message a dead letter of a group, after two attempts."""
    [(group_id, log_id)] = world.sql(
        "SELECT group_id, log_id FROM outbox.consumer_group, outbox.commit_log"
        " WHERE consumer_group.name = %s AND key = %s ORDER BY log_id DESC LIMIT 1",
        group, key,
    )  # fmt: skip
    for attempt in (0, 1):
        world.sql(
            "INSERT INTO outbox.failure (group_id, log_id, attempt, error) VALUES (%s, %s, %s, %s)",
            group_id, log_id, attempt, error,
        )  # fmt: skip
    world.sql(
        "INSERT INTO outbox.dead_letter (group_id, log_id, attempts, error) VALUES (%s, %s, 2, %s)",
        group_id, log_id, error,
    )  # fmt: skip


def blocked(world: World, group: str, *, error: str = "ValueError: no") -> UUID:
    """A message that an ordered group fails to handle; two more wait behind it."""
    register(world.run, Subscription(topic="orders", group=group, mode=Mode.ORDERLY))
    bad = publish("orders", {}, key="bad", at_once=True).message_id
    for _ in range(2):
        publish("orders", {}, key="bad", at_once=True)
    sequence()
    world.sql(
        "INSERT INTO outbox.failure (group_id, log_id, attempt, error) SELECT group_id, log_id, 0, %s"
        " FROM outbox.consumer_group, outbox.commit_log WHERE consumer_group.name = %s AND message_id = %s",
        error, group, bad,
    )  # fmt: skip
    return bad


def retried(world: World, group: str, key: str, error: str, *, failures: int = 1) -> None:
    """Let a message wait for another attempt of a group, after so many failed ones."""
    [(group_id, log_id, topic_id)] = world.sql(
        "SELECT group_id, log_id, topic_id FROM outbox.consumer_group, outbox.commit_log"
        " WHERE consumer_group.name = %s AND key = %s",
        group, key,
    )  # fmt: skip
    ensure_retry_queue(world.run, group_id, topic_id)
    world.sql(
        "INSERT INTO outbox.failure (group_id, log_id, attempt, error)"
        " SELECT %s, %s, number, %s FROM generate_series(0, %s) number",
        group_id, log_id, error, failures - 1,
    )  # fmt: skip
    world.sql(
        "INSERT INTO outbox.scheduled (log_id, due_at, queue_id, attempt)"
        " SELECT %s, now() + interval '1 hour', queue_id, %s FROM outbox.queue JOIN outbox.topic USING (topic_id)"
        " WHERE retry_of = %s AND number = %s",
        log_id, failures, group_id, topic_id,
    )  # fmt: skip


def working(world: World, group: str, message_id: UUID) -> UUID:
    """A live process of a group, whose handler has run for 40 s with a message; returns its instance."""
    [(group_id,)] = world.sql("SELECT group_id FROM outbox.consumer_group WHERE name = %s", group)
    report = CallsReport(3, [CallReport(group, "orders", str(message_id), 1, 2, 40.0)])
    instance = uuid4()
    members.heartbeat(world.run, instance, {group_id: ["orders"]}, term_seconds=600, report=report)
    return instance


def dead_keys(run: Executor, group: str) -> list[str]:
    """The keys of a group's open dead letters."""
    return sorted(letter.key for letter in dead_letters.list_dead_letters(run, group))
