"""`manage.py outbox_schedule`: shows the schedules, and acts on them."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared actions and prints the declared listings of this command."""

    help = "Show the schedules on the broker, and act on them. Workers store the schedules of OUTBOX['SCHEDULES']."
