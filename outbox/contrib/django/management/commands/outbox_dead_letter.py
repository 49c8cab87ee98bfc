"""`manage.py outbox_dead_letter`: shows dead letters, and acts on them."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    help = "Show the dead letters of consumer groups, and act on them."
