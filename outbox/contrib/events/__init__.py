"""Typed events in a project: publishing, handlers, contracts, and messages that wait for newer code. docs/events.md is
their page.

    INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.events"]

Events are declared with `outbox.events`. A program without Django only imports this module.
"""

from outbox import hooks
from outbox.contrib.events.option import Events

__all__ = ["Events"]

# Here and not in the app: models are imported before `ready`, and their modules may declare publishers of events.
hooks.add_message_types(
    "events",
    hooks.MessageTypes(
        message="outbox.contrib.events.option.event_message",
        topic="outbox.contrib.events.option.topic_of",
        option="outbox.contrib.events.option.option_of",
        advice="write @event(…) above the class",
    ),
)
hooks.add_schema(
    "events",
    "outbox.contrib.events.schema",
    content={"unknown_version": "outbox.contrib.events.waiting.erase_errors"},
)
hooks.add_result_report(Events, "outbox.contrib.events.waiting.UnknownVersions")
hooks.add_subscription_rows(
    "events",
    deleted="outbox.contrib.events.waiting.forget",
    process_ended="outbox.contrib.events.waiting.forget_instance",
    expired="outbox.contrib.events.waiting.forget_the_dead",
)
hooks.add_conditions("outbox.contrib.events.waiting", of_broker=True)
