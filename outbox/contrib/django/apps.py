"""The Django application."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import Tags, register
from django.db.backends.signals import connection_created
from django.db.models.signals import post_migrate

from outbox.hooks import when_called


class OutboxConfig(AppConfig):
    """The Django app of outbox. To install the app, add 'outbox.contrib.django' to INSTALLED_APPS."""

    name = "outbox.contrib.django"
    label = "outbox"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = "Outbox"

    def ready(self) -> None:
        """Connect the signals that are needed before the first request. This method uses no database.

        A web process calls none of the functions that are named by their dotted paths, so it does not import them.
        """
        from outbox.contrib.django.database import in_tests
        from outbox.contrib.django.database.transactions import watch_connection
        from outbox.contrib.django.engine.broker import let_go_of_test_databases
        from outbox.contrib.django.subscribers.registry import add_discovery
        from outbox.utils import faults, given_up

        faults.check_environment()
        in_tests.remember_configured_names()
        given_up.install(when_called("outbox.contrib.django.operations.signals.send_dead_lettered"))
        add_discovery(_discover_celery_tasks)
        register(when_called("outbox.contrib.django.operations.checks.check_settings"), "outbox")
        register(when_called("outbox.contrib.django.operations.checks.check_databases"), Tags.database)
        connection_created.connect(let_go_of_test_databases, dispatch_uid="outbox.let_go_of_test_databases")
        connection_created.connect(watch_connection, dispatch_uid="outbox.watch_connection")
        after_migrate = when_called("outbox.contrib.django.operations.installation.after_migrate")
        # Only the signal refers to this function, so the reference must be strong.
        post_migrate.connect(after_migrate, sender=self, weak=False, dispatch_uid="outbox.after_migrate")


def _discover_celery_tasks() -> None:
    """Subscribe the service to its own Celery tasks. Celery is imported only if OUTBOX['CELERY_APP'] is set."""
    from outbox.contrib.django.settings.conf import get_settings

    if get_settings().celery_app is not None:
        from outbox.contrib.django.publishing.celery_tasks import register_hand_over

        register_hand_over()
