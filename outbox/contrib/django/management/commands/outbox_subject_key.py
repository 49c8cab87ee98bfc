"""`manage.py outbox_subject_key delete|rotate`."""

from __future__ import annotations

from django.core.management.base import CommandParser

from outbox.contrib.django.management.acting import ActionCommand


class Command(ActionCommand):
    """Parses the arguments, then runs the chosen action."""

    help = "Delete the key of a subject, which erases its bodies in every copy, or encrypt all keys with a new key."

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_subcommands(parser)
