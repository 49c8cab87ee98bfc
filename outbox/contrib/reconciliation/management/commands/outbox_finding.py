"""`manage.py outbox_finding`: shows saved findings, and acts on them."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared actions and prints the declared listings of this command."""

    help = "Show the findings that `outbox_reconcile --save` has saved, and act on them."
