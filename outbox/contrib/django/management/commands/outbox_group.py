"""`manage.py outbox_group`: shows consumer groups, and acts on them."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    help = "Show consumer groups, and act on them."
