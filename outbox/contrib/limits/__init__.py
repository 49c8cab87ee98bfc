"""Limits of subscriptions, for all workers of a group together: calls at the same time, calls of one key, and messages
per time. docs/limits.md is their page.

    INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.limits"]

    @subscriber("order.paid", group="mail", options=[Limits(running=20)])

A program without Django only imports this module.
"""

from outbox import hooks
from outbox.contrib.limits.declaration import Limits

__all__ = ["Limits"]

# Here and not in the app: a process that knows a subscription with limits obeys them, whatever INSTALLED_APPS says.
hooks.add_schema(
    "limits",
    "outbox.contrib.limits.schema",
    content={
        "slot": "outbox.contrib.limits.slots.release_keys",
        "slot_demand": "outbox.contrib.limits.slots.forget_keys",
    },
)
hooks.add_admission(Limits, "outbox.contrib.limits.limiter.Limiter")
hooks.add_lane(Limits, "outbox.contrib.limits.keyed_lane.KeyedLane")
hooks.add_subscription_rows(
    "limits",
    registered="outbox.contrib.limits.slots.declare_or_withdraw",
    deleted="outbox.contrib.limits.slots.forget",
    process_ended="outbox.contrib.limits.slots.release_all",
    expired="outbox.contrib.limits.slots.forget_the_dead",
)
hooks.add_waits("outbox.contrib.limits.operations.waits")
hooks.add_conditions("outbox.contrib.limits.operations", of_broker=True)
