"""`manage.py outbox_group`: shows consumer groups, and acts on them."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared actions and prints the declared listings of this command."""

    help = "Show consumer groups, and act on them."
