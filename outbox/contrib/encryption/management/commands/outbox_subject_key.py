"""`manage.py outbox_subject_key delete|rotate`."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared actions and prints the declared listings of this command."""

    help = "Delete the key of a subject, which erases its bodies in every copy, or encrypt all keys with a new key."
