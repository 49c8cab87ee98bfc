"""The Django application of receiving."""

from __future__ import annotations

from django.apps import AppConfig

from outbox import hooks
from outbox.contrib.receiving.settings import ReceiveSettings

hooks.add_settings(ReceiveSettings)
hooks.add_fault_points("receive.after_send")


class OutboxReceivingConfig(AppConfig):
    """Receiving. To use it, add 'outbox.contrib.receiving' to INSTALLED_APPS."""

    name = "outbox.contrib.receiving"
    label = "outbox_receiving"
    verbose_name = "Outbox receiving"

    def ready(self) -> None:
        """Join the core: a role of workers, a condition, and an action."""
        hooks.add_role(
            "receive",
            # No worker starts this role by itself: it needs credentials for other systems, so an operator starts it on
            # a host that has the credentials.
            hooks.Role(
                "store foreign messages as OUTBOX['RECEIVE'] declares; with --drain until two seconds pass without one",
                run="outbox.contrib.receiving.running.run_receive",
                drain="outbox.contrib.receiving.running.receive_and_say",
                option="receiver",
            ),
        )
        hooks.add_conditions("outbox.contrib.receiving.actions", of_broker=True)
        hooks.add_actions("outbox.contrib.receiving.actions")
