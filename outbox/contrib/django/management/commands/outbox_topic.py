"""`manage.py outbox_topic create|alter|delete|list`."""

from __future__ import annotations

import dataclasses
from typing import Any

from django.core.management.base import CommandParser

from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import list_topics
from outbox.broker.operations.deletion import delete_topic
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.operations.commands import alter_topic, create_topic, describe_losses
from outbox.topic import MessageType


class Command(OutboxCommand):
    """Parses, then calls one function."""

    help = "Create, alter, delete or list the topics of the broker. `migrate` declares those of OUTBOX['TOPICS']."

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        for action, what in (("create", "declare a new topic"), ("alter", "change some properties, keep the others")):
            options = actions.add_parser(action, help=what)
            options.add_argument("name")
            options.add_argument(
                "--type", action="append", dest="types", choices=[str(item) for item in MessageType], help="repeatable"
            )
            options.add_argument("--queue-count", type=int, help="how many consumers can share the topic")
            options.add_argument("--retention-seconds", type=int, help="how long consumed messages are kept")
            options.add_argument(
                "--on-park",
                choices=["hold", "release"],
                help="FIFO: later messages behind a parked one: hold or release",
            )
            options.add_argument("--key-lock", choices=["on", "off"], help="FIFO: whether publish serialises its keys")
            self.add_dry_run(options)
            self.add_json(options)
        gone = actions.add_parser("delete", help="refuse new messages, delete its subscriptions and messages")
        gone.add_argument("name")
        self.add_no_input(gone)
        self.add_json(gone)
        self.add_json(actions.add_parser("list", help="every topic of the broker"))

    def handle(self, *args: Any, **options: Any) -> None:
        if options["action"] == "list":
            self._list(as_json=options["json"])
            return
        if options["action"] == "delete":
            self._delete(options)
            return
        wanted = {name: options[name] for name in ("queue_count", "retention_seconds", "on_park")}
        changes: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
        if options["types"]:
            changes["types"] = frozenset(map(MessageType, options["types"]))
        if options["key_lock"]:
            changes["key_lock"] = options["key_lock"] == "on"
        act = create_topic if options["action"] == "create" else alter_topic
        outcome = act(options["name"], dry_run=options["dry_run"], **changes)
        if options["json"]:
            self.print_json({"topic": options["name"], "outcome": outcome, "dry_run": options["dry_run"]})
        else:
            self.say(outcome)

    def _delete(self, options: dict[str, Any]) -> None:
        name = options["name"]
        with broker_connection() as (connection, schema):
            run = Executor(connection, schema)
            loss = delete_topic(run, name, dry_run=True)
            if not options["dry_run"]:
                lost = f"{loss.undelivered} messages that are in no queue yet, and {describe_losses(loss.groups)}"
                self.confirm(f"topic {name} will be deleted, with {lost}.", options)
                loss = delete_topic(run, name)
        if options["json"]:
            self.print_json({"deleted": not options["dry_run"], "loss": loss})
            return
        self.say(f"in no queue yet: {loss.undelivered}")
        self.print_rows(
            ["group", "not consumed", "retrying", "dead"], ((o.group, o.lag, o.retrying, o.dead) for o in loss.groups)
        )
        if options["dry_run"]:
            self.say("nothing was deleted (--dry-run)")
        else:
            self.say(f"{name} was deleted. Remove it from OUTBOX['TOPICS'], or the next `migrate` declares it again.")

    def _list(self, *, as_json: bool) -> None:
        with broker_connection() as (connection, schema):
            topics = list_topics(Executor(connection, schema))
        if as_json:
            self.print_json([{**dataclasses.asdict(topic), "types": sorted(topic.types)} for topic in topics])
            return
        self.print_rows(
            ["topic", "types", "queues", "retention s", "key lock", "on park"],
            (
                (t.name, "+".join(sorted(t.types)), t.queue_count, t.retention_seconds, t.key_lock, t.on_park)
                for t in topics
            ),
        )
