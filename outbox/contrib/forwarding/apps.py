"""The Django application of forwarding."""

from __future__ import annotations

from django.apps import AppConfig

from outbox import hooks
from outbox.contrib.forwarding.settings import ForwardSettings

hooks.add_settings(ForwardSettings)
hooks.add_fault_points("forward.after_acknowledgement")


class OutboxForwardingConfig(AppConfig):
    """Forwarding. To use it, add 'outbox.contrib.forwarding' to INSTALLED_APPS."""

    name = "outbox.contrib.forwarding"
    label = "outbox_forwarding"
    verbose_name = "Outbox forwarding"

    def ready(self) -> None:
        """Join the core: a role of workers."""
        hooks.add_role(
            "forward",
            # No worker starts this role by itself: it needs credentials for other systems, so an operator starts it on
            # a host that has the credentials.
            hooks.Role(
                "send messages as OUTBOX['FORWARD'] declares",
                run="outbox.contrib.forwarding.running.run_forward",
                drain="outbox.contrib.forwarding.running.forward_and_say",
                option="group",
                groups="outbox.contrib.forwarding.running.declared_groups",
            ),
        )
