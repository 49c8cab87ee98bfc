"""`manage.py outbox_relay list|retry|discard`."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared actions and prints the declared listings of this command."""

    help = "List the messages that wait for the relay to RocketMQ, send a rejected one again, or discard one."
