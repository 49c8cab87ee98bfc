"""Wiring a project's Celery app: the worker option `--outbox`, and the periodic passes in the beat schedule.

    app = Celery("shop")
    app.config_from_object("django.conf:settings", namespace="CELERY")
    outbox.contrib.django.celery.setup(app)

Run `celery -A shop worker --beat --outbox -Q celery,outbox`. Celery itself is imported by `outbox.broker.celery` only.
"""

from __future__ import annotations

from typing import Any

from outbox.broker.celery import beat, bootstep
from outbox.contrib.django.periodic import passes
from outbox.contrib.django.workers import child_specs


def setup(app: Any) -> None:
    """Add `--outbox` to the app's worker, and check-back and pruning to its beat schedule.

    The settings are read when the app is finalised, not here: a Celery module may be imported before Django is
    set up.
    """
    bootstep.install(app, child_specs)
    app.on_after_finalize.connect(_add_passes, weak=False)


def _add_passes(sender: Any, **_: Any) -> None:
    beat.install(sender, passes())
