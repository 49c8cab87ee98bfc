"""The Django application of RocketMQ."""

from __future__ import annotations

from typing import Final

from django.apps import AppConfig

from outbox import hooks

FAULT_POINTS: Final = (
    "relay.before_take",
    "relay.after_take",
    "relay.before_send",
    "relay.in_send",
    "relay.after_send",
    "relay.after_confirmation",
    "relay.after_delete",
)

_PRUNE_SECONDS: Final = 3600.0

hooks.add_engine(
    "rocketmq",
    hooks.Engine(kind="outbox.contrib.rocketmq.engine.RocketMQEngine", observer="outbox.contrib.rocketmq.operations"),
)
hooks.add_fault_points(*FAULT_POINTS)


class OutboxRocketMQConfig(AppConfig):
    """RocketMQ as the broker. To use it, add 'outbox.contrib.rocketmq' to INSTALLED_APPS."""

    name = "outbox.contrib.rocketmq"
    label = "outbox_rocketmq"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = "Outbox on RocketMQ"

    def ready(self) -> None:
        """Join the core: a pass, a role, actions, listings and tables."""
        hooks.add_pass("dead_letter_notes", _PRUNE_SECONDS, "outbox.contrib.rocketmq.dead_letter_notes.prune")
        hooks.add_role(
            "relay",
            hooks.Role(
                "send the messages of the table outbox_relay to RocketMQ",
                run="outbox.contrib.rocketmq.relaying.run_relay_role",
                is_needed="outbox.contrib.rocketmq.relaying.is_needed",
            ),
        )
        hooks.add_actions("outbox.contrib.rocketmq.actions")
        hooks.add_tables(
            self.label,
            # A row of the relay has a body, so the publisher reads only the columns by which it finds the row.
            rights={"outbox_relay": {"INSERT": (), "SELECT": ("sequence", "message_id", "due_at")}},
            content={
                "DeadLetterNote": "outbox.contrib.rocketmq.dead_letter_notes.erase_notes",
                "RelayEntry": "outbox.contrib.rocketmq.relay_rows.erase_relayed",
                "RelayLease": None,
            },
        )
