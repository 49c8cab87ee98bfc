"""`manage.py outbox_finding list|repair|forget`."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared actions and prints the declared listings of this command."""

    help = "List the findings that `outbox_reconcile --save` has saved, do the repair of one, or forget a saved result."
