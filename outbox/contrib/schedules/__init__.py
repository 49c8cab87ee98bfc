"""Schedules: the leader publishes a message at each due moment of a cron expression. docs/schedules.md is their page.

INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.schedules"]

    @scheduled("0 3 * * *", topic="reports", group="reports")
    def nightly_report(delivery): ...
"""

from outbox.contrib.schedules.decorator import scheduled

__all__ = ["scheduled"]
