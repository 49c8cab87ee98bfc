"""`manage.py outbox_topic list|create|alter|delete`."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared actions and prints the declared listings of this command."""

    help = "Create, alter, delete or list the topics of the broker. `migrate` declares the topics of OUTBOX['TOPICS']."
