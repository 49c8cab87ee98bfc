"""The Django application of large bodies."""

from __future__ import annotations

from typing import Final

from django.apps import AppConfig
from django.core.checks import register

from outbox import hooks
from outbox.codec import REFERENCE_CONTENT_TYPE
from outbox.contrib.large_bodies.settings import LargeBodySettings
from outbox.hooks import BodyForm, when_called

_PASS_SECONDS: Final = 3600.0

hooks.add_settings(LargeBodySettings)
hooks.add_fault_points("large_body.before_upload", "large_body.after_upload", "large_body.before_delete")


class OutboxLargeBodiesConfig(AppConfig):
    """Large bodies. To use them, add 'outbox.contrib.large_bodies' to INSTALLED_APPS."""

    name = "outbox.contrib.large_bodies"
    label = "outbox_large_bodies"
    verbose_name = "Outbox large bodies"

    def ready(self) -> None:
        """Join the core: what becomes of a body when it is published, read, shown and erased, a pass and a check."""
        hooks.add_body_step("large_bodies", "outbox.contrib.large_bodies.objects.step")
        hooks.add_body_form(
            REFERENCE_CONTENT_TYPE,
            BodyForm(
                codec="outbox.contrib.large_bodies.objects.LargeBodyCodec",
                shown="outbox.contrib.large_bodies.objects.shown",
            ),
        )
        hooks.add_removal("storage.large_bodies", "outbox.contrib.large_bodies.objects.delete")
        hooks.add_pass("large_bodies", _PASS_SECONDS, "outbox.contrib.large_bodies.orphans.run_once")
        register(when_called("outbox.contrib.large_bodies.objects.check"), "outbox")
