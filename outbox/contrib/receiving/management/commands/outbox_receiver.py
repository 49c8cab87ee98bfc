"""`manage.py outbox_receiver`: acts on the stored state of receivers."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared action of this command."""

    help = "Act on the stored state of the receivers of OUTBOX['RECEIVE']."
