"""`manage.py outbox_topic`: shows the topics of the broker, and deletes them."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    help = "Show the topics of the broker, and delete them. `migrate` declares and changes those of OUTBOX['TOPICS']."
