"""The Django application."""

from __future__ import annotations

from django.apps import AppConfig
from django.db.backends.signals import connection_created
from django.db.models.signals import post_migrate


class OutboxConfig(AppConfig):
    """The Django app of outbox. To install the app, add 'outbox.contrib.django' to INSTALLED_APPS."""

    name = "outbox.contrib.django"
    label = "outbox"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = "Outbox"

    def ready(self) -> None:
        """Connect the signals that are needed before the first request. This method uses no database."""
        from outbox.contrib.django import saga
        from outbox.contrib.django.database import in_tests
        from outbox.contrib.django.database.transactions import watch_connection
        from outbox.contrib.django.engine.broker import let_go_of_test_databases
        from outbox.contrib.django.operations import checks, telemetry, watching
        from outbox.contrib.django.operations.installation import after_migrate
        from outbox.contrib.django.subscribers.registry import add_discovery
        from outbox.contrib.django.worker.periodic import add_pass

        in_tests.remember_configured_names()
        watching.add_rule(saga.CONDITION, saga.rule)
        add_pass("sagas", saga.PASS_INTERVAL_SECONDS, saga.mend)
        add_discovery(_discover_celery_tasks)
        checks.register_all()
        connection_created.connect(let_go_of_test_databases, dispatch_uid="outbox.let_go_of_test_databases")
        telemetry.record_if_wanted()
        telemetry.trace_if_wanted()
        connection_created.connect(watch_connection, dispatch_uid="outbox.watch_connection")
        post_migrate.connect(after_migrate, sender=self, dispatch_uid="outbox.after_migrate")


def _discover_celery_tasks() -> None:
    """Subscribe the service to its own Celery tasks. Celery is imported only if OUTBOX['CELERY_APP'] is set."""
    from outbox.contrib.django.settings.conf import get_settings

    if get_settings().celery_app is not None:
        from outbox.contrib.django.publishing.celery_tasks import register_hand_over

        register_hand_over()
