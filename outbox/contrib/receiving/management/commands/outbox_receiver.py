"""`manage.py outbox_receiver forget`."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared action of this command."""

    help = "Delete the state of receivers that are not in OUTBOX['RECEIVE'] any more."
