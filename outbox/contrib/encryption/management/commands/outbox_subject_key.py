"""`manage.py outbox_subject_key`: acts on the keys of subjects."""

from outbox.contrib.django.management.acting import OperatorCommand


class Command(OperatorCommand):
    """Runs the declared actions and prints the declared listings of this command."""

    help = "Delete the key of a subject, which erases its bodies in every copy, or act on all keys."
