"""`manage.py outbox_process`: shows the consumer processes."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    help = "List the consumer processes of all workers, with their running handler calls."
