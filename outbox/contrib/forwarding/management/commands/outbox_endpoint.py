"""`manage.py outbox_endpoint list|enable`."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared actions and prints the declared listings of this command."""

    help = "List the endpoints of OUTBOX['FORWARD'] with their deliveries, and enable a disabled endpoint."
