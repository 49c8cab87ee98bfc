"""Typed events: messages whose bodies have a declared type and a version.

    @event("order.paid", key="order_id")
    @dataclass(frozen=True)
    class OrderPaid:
        order_id: int

Declarations need neither Django nor a database. To publish and handle events, add the app `outbox.contrib.events` to
INSTALLED_APPS.
"""

from outbox import hooks
from outbox.events.declaration import UnknownEventVersion, event, upcast

__all__ = ["UnknownEventVersion", "event", "upcast"]

# Until the app takes this place, the use of an event is refused: its bodies would reach handlers as they are stored.
hooks.message_types.setdefault(
    "events",
    hooks.MessageTypes(
        message="outbox.events.without_app.message",
        topic="outbox.events.without_app.topic",
        option="outbox.events.without_app.option",
        advice="write @event(…) above the class",
    ),
)
