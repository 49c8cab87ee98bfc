"""The Django application of schedules."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import register

from outbox import hooks
from outbox.contrib.schedules.schedule import RENEW_SECONDS
from outbox.contrib.schedules.settings import ScheduleSettings

hooks.add_settings(ScheduleSettings)
hooks.add_fault_points("schedule.after_append", "schedule.after_commit")


class OutboxSchedulesConfig(AppConfig):
    """Schedules. To use them, add 'outbox.contrib.schedules' to INSTALLED_APPS."""

    name = "outbox.contrib.schedules"
    label = "outbox_schedules"
    verbose_name = "Outbox schedules"

    def ready(self) -> None:
        """Join the core: a table of the broker, work of the leader, a pass, a condition, actions, a metric, a check."""
        hooks.add_schema("schedules", f"{self.name}.schema", content={"schedule": f"{self.name}.schedule.erase_errors"})
        hooks.add_leader_work("schedules", f"{self.name}.publishing.Scheduling")
        # Every worker stores the declarations of its version.
        hooks.add_pass("schedules", RENEW_SECONDS, f"{self.name}.declaring.declare_schedules", in_every_process=True)
        hooks.add_conditions(f"{self.name}.conditions", of_broker=True)
        hooks.add_actions(f"{self.name}.actions")
        hooks.add_metrics(f"{self.name}.conditions")
        register(hooks.when_called(f"{self.name}.declaring.check_schedules"), "outbox")
