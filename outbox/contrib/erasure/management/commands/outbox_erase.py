"""`manage.py outbox_erase TOPIC --key KEY | --message ID`: erases personal data of messages everywhere."""

from typing import Any

from django.core.management.base import CommandParser

from outbox.contrib.django.catalogue import ACTIONS
from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Parses the arguments, then runs the action `erase`."""

    help = (
        "Erase the content of the messages of a key, or of messages by their ids, in all tables of outbox. The "
        "messages keep their ids, tags and times. Handlers that get an erased message see delivery.erased."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_action(parser, ACTIONS["erase"])

    def handle(self, *args: Any, **options: Any) -> None:
        self.act(ACTIONS["erase"], options)
