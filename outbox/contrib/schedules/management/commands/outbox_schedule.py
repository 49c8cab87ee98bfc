"""`manage.py outbox_schedule list|pause|resume|run`."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared actions and prints the declared listings of this command."""

    help = "List, pause, resume or run the schedules on the broker. Workers store the schedules of OUTBOX['SCHEDULES']."
