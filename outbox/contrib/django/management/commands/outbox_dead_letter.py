"""`manage.py outbox_dead_letter list|replay|discard`."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared actions and prints the declared listings of this command."""

    help = "List the dead letters of consumer groups, replay them, or discard them."
