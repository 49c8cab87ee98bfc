"""The declared events of the project, and the AsyncAPI document of its service."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from django.apps import apps
from django.utils.module_loading import module_has_submodule

from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers.registry import autodiscover, subscribers
from outbox.errors import ConfigurationError
from outbox.events.asyncapi import Service, asyncapi
from outbox.events.declaration import EventType, events
from outbox.utils.safe_text import error_line

_MODULE: Final = "events"


def declared_events() -> list[EventType]:
    """Import the subscribers and the module `events` of every app, and return all declared events.

    Raises ConfigurationError if a module cannot be imported.
    """
    autodiscover()
    for app in apps.get_app_configs():
        if app.module is None or app.name.startswith("django.") or not module_has_submodule(app.module, _MODULE):
            continue
        try:
            import_module(f"{app.name}.{_MODULE}")
        except Exception as error:
            raise ConfigurationError(
                f"the events in {app.name}.{_MODULE} cannot be imported: {error_line(error)}."
            ) from error
    return events()


def service_document(*, title: str | None = None, version: str = "1.0.0") -> dict[str, Any]:
    """Return the AsyncAPI 3 document of this service. The default title is the producer group."""
    declared = declared_events()
    settings = get_settings()
    service = Service(title or settings.producer_group or "outbox", version, sorted(settings.topics))
    return asyncapi(service, declared, [one.subscription for one in subscribers()])
