"""`manage.py outbox_dead_letter list|replay`."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser

from outbox.broker.database.executor import Executor
from outbox.broker.groups.registration import group_id_of
from outbox.broker.operations.dead_letters import failed_attempts, list_dead_letters
from outbox.contrib.django.databases import broker_connection
from outbox.contrib.django.management.output import OutboxCommand, first_line
from outbox.contrib.django.operations import replay_dead_letters


class Command(OutboxCommand):
    """Parses, then calls one function."""

    help = "List the messages consumer groups gave up, or deliver them again."

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        shown = actions.add_parser(
            "list", help="what was given up and is not replayed; --json with the error of every attempt"
        )
        shown.add_argument("group", nargs="?")
        shown.add_argument("--limit", type=int, default=100)
        shown.add_argument("--replayed", action="store_true", help="also those that were replayed")
        self.add_json(shown)
        again = actions.add_parser("replay", help="deliver again; the attempts count from 1")
        again.add_argument("group")
        again.add_argument("ids", nargs="*", type=UUID, help="message ids")
        again.add_argument("--all", action="store_true", help="all dead letters of the group, oldest first")
        again.add_argument("--limit", type=int, default=10_000)
        again.add_argument("--dry-run", action="store_true", help="say what would be replayed")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["action"] == "list":
            self._list(options)
        elif bool(options["ids"]) == options["all"]:
            raise CommandError("name message ids, or pass --all.")
        else:
            ids = None if options["all"] else options["ids"]
            count = replay_dead_letters(options["group"], ids, limit=options["limit"], dry_run=options["dry_run"])
            self.say(f"{count} dead letters {'would be' if options['dry_run'] else 'are'} delivered again.")

    def _list(self, options: dict[str, Any]) -> None:
        with broker_connection() as (connection, schema):
            if options["group"]:
                group_id_of(Executor(connection, schema), options["group"])
            letters = list_dead_letters(
                Executor(connection, schema), options["group"], replayed=options["replayed"], limit=options["limit"]
            )
            if options["json"]:
                self.print_json(
                    [
                        {
                            "letter": item,
                            "failures": failed_attempts(Executor(connection, schema), item.group, item.message_id),
                        }
                        for item in letters
                    ]
                )
                return
        self.print_rows(
            ["group", "message", "topic", "key", "attempts", "dead since", "error"],
            ((d.group, d.message_id, d.topic, d.key, d.attempts, d.dead_at, first_line(d.error)) for d in letters),
        )
