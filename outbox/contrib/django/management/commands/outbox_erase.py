"""`manage.py outbox_erase TOPIC --key KEY | --message ID`: erases personal data of messages everywhere."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from outbox.contrib.django.actions.erasing import ERASE
from outbox.contrib.django.management.acting import ActionCommand


class Command(ActionCommand):
    """Parses the arguments, then runs the action `erase`."""

    help = (
        "Erase the content of the messages of a key, or of messages by their ids, in all tables of outbox. The "
        "messages keep their ids, tags and times. Handlers that get an erased message see delivery.erased."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_action(parser, ERASE)

    def handle(self, *args: Any, **options: Any) -> None:
        self.act(ERASE, options)
