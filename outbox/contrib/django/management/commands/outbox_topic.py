"""`manage.py outbox_topic`: shows the topics of the broker, and deletes them."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared actions and prints the declared listings of this command."""

    help = "Show the topics of the broker, and delete them. `migrate` declares and changes those of OUTBOX['TOPICS']."
