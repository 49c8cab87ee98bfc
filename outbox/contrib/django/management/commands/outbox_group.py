"""`manage.py outbox_group list|offsets|pause|resume|skip|reset|rename|delete`."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared actions and prints the declared listings of this command."""

    help = "List, pause, resume, reset, limit, rename or delete consumer groups; skip a message."
