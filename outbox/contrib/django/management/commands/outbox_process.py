"""`manage.py outbox_process list`."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Prints the declared listings of this command."""

    help = "List the consumer processes of all workers, with their running handler calls."
