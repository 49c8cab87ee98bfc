"""`manage.py outbox_process list|drain|stop`."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared actions and prints the declared listings of this command."""

    help = "List the consumer processes, drain one of them, or stop its worker."
