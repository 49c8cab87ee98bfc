"""`manage.py outbox_recall`: recall messages that wait for their delivery time or for a retry."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser

from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.operations.commands import recall_messages


class Command(OutboxCommand):
    """Parses, then calls recall_messages."""

    help = "Recall messages that wait for their delivery time or for a retry. Exits with 1 if one was not recalled."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("ids", nargs="*", type=UUID, help="message ids")
        parser.add_argument("--topic", help="with --key: all waiting messages of this topic and key")
        parser.add_argument("--key")
        self.add_dry_run(parser, "show what would be recalled, change nothing")
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        by_key = options["topic"] is not None and options["key"] is not None
        if (options["topic"] is None) != (options["key"] is None) or bool(options["ids"]) == by_key:
            raise CommandError("name message ids, or pass --topic and --key.")
        outcomes = recall_messages(
            options["ids"], topic=options["topic"], key=options["key"], dry_run=options["dry_run"]
        )
        recalled = [one for one in outcomes if one.is_recalled]
        if options["json"]:
            self.print_json(outcomes)
        else:
            self.print_rows(
                ["message", "topic", "key", "outcome", "retry of"],
                ((one.message_id, one.topic, one.key, one.status, ",".join(one.groups)) for one in outcomes),
            )
            would = "would be" if options["dry_run"] else "are"
            self.say(f"{len(recalled)} of {len(outcomes)} messages {would} recalled.")
        if by_key and not outcomes:
            raise CommandError(
                f"no message of topic {options['topic']!r} with key {options['key']!r} waits for its delivery time "
                "or a retry."
            )
        if len(recalled) < len(outcomes):
            left = ", ".join(f"{one.message_id} ({one.status})" for one in outcomes if not one.is_recalled)
            raise CommandError(f"not recalled: {left}. `outbox_trace ID` shows where a message is.")
