"""`manage.py outbox_reject`: refuse new transactional messages, or accept them again."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from outbox.contrib.django.management.output import OutboxCommand
from outbox.contrib.django.operations.commands import switch_transactional


class Command(OutboxCommand):
    """Parses, then calls switch_transactional."""

    help = "Refuse new transactional messages from every producer (on), accept them again (off), or show the state."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("switch", nargs="?", choices=["on", "off"])
        self.add_dry_run(parser)
        self.add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        wanted = None if options["switch"] is None else options["switch"] == "on"
        rejecting, changed = switch_transactional(wanted, dry_run=options["dry_run"])
        if options["json"]:
            self.print_json({"rejecting": rejecting, "changed": changed})
            return
        what = "refused" if rejecting else "accepted"
        if wanted is None:
            self.say(f"transactional messages are {what}.")
        elif options["dry_run"]:
            self.say(f"transactional messages would be {what}; {'a change' if changed else 'as they are now'}.")
        else:
            self.say(f"transactional messages are {what}{' from now on' if changed else ' as before'}.")
