"""The Django application of forwarding."""

from __future__ import annotations

from django.apps import AppConfig

from outbox import hooks
from outbox.contrib.forwarding.settings import ForwardSettings

hooks.add_settings(ForwardSettings)
hooks.add_fault_points("forward.after_acknowledgement", "forward.before_disabled")


class OutboxForwardingConfig(AppConfig):
    """Forwarding. To use it, add 'outbox.contrib.forwarding' to INSTALLED_APPS."""

    name = "outbox.contrib.forwarding"
    label = "outbox_forwarding"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = "Outbox forwarding"

    def ready(self) -> None:
        """Join the core: a role of workers, a condition, an action with its listing, and a table."""
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
        hooks.add_conditions("outbox.contrib.forwarding.endpoints")
        hooks.add_actions("outbox.contrib.forwarding.actions")
        # The reason why an endpoint is disabled is its answer, which is about no message.
        hooks.add_tables(self.label, content={"ForwardEndpoint": None})
