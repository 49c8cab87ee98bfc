"""`manage.py outbox_transaction`: shows the open transactions of the broker, and acts on them."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    help = "Show the open transactions of the broker, and act on them."
