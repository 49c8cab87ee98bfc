"""The Django application."""

from __future__ import annotations

from django.apps import AppConfig


class OutboxTasksConfig(AppConfig):
    """Django's tasks with outbox as backend. To use it, add 'outbox.contrib.django.tasks' to INSTALLED_APPS."""

    name = "outbox.contrib.django.tasks"
    label = "outbox_tasks"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = "Outbox tasks"

    def ready(self) -> None:
        """Register the subscribers that run tasks, so that an error in TASKS is raised when a process starts."""
        from outbox.contrib.django.operations.additions import add_conditions, add_pass
        from outbox.contrib.django.tasks import stranded
        from outbox.contrib.django.tasks.registration import register_backends

        register_backends()
        add_conditions(stranded.__name__)
        add_pass("tasks", stranded.PASS_INTERVAL_SECONDS, stranded.mend)
