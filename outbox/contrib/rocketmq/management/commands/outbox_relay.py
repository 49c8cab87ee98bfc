"""`manage.py outbox_relay`: shows what waits for the relay, and acts on it."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared actions and prints the declared listings of this command."""

    help = "Show the messages that wait for the relay to RocketMQ, and act on them."
