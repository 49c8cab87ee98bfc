"""The Django application."""

from __future__ import annotations

from typing import Final

from django.apps import AppConfig

from outbox import hooks

_MEND_SECONDS: Final = 60.0


class OutboxTasksConfig(AppConfig):
    """Django's tasks with outbox as backend. To use it, add 'outbox.contrib.tasks' to INSTALLED_APPS."""

    name = "outbox.contrib.tasks"
    label = "outbox_tasks"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = "Outbox tasks"

    def ready(self) -> None:
        """Register the subscribers that run tasks, so that an error in TASKS is raised when a process starts."""
        from outbox.contrib.tasks.running import register_backends

        register_backends()
        hooks.add_conditions("outbox.contrib.tasks.stranded")
        hooks.add_pass("tasks", _MEND_SECONDS, "outbox.contrib.tasks.stranded.mend")
        hooks.add_tables(
            self.label,
            # A task has a body, so the publisher reads only the columns by which it finds the task.
            rights={
                "outbox_task": {
                    "INSERT": (),
                    "SELECT": ("id", "status", "message_id", "announced_at"),
                    "UPDATE": ("message_id", "announced_at"),
                }
            },
            content={"TaskEntry": "outbox.contrib.tasks.results.erase_calls"},
        )
