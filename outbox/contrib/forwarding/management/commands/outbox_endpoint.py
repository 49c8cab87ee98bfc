"""`manage.py outbox_endpoint`: shows the endpoints of FORWARD, and acts on them."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared actions and prints the declared listings of this command."""

    help = "Show the endpoints of OUTBOX['FORWARD'] with their deliveries, and act on them."
