"""Times at the boundary to a project with USE_TZ = False; inside outbox they are aware."""

from __future__ import annotations

from datetime import UTC, datetime

from django.conf import settings
from django.db import connections
from django.utils import timezone


def aware(moment: datetime) -> datetime:
    """A project's time as an aware one: without USE_TZ a naive time is in TIME_ZONE, as everywhere in such a project.

    With USE_TZ a naive time stays naive; the caller refuses it.
    """
    if moment.tzinfo is not None or settings.USE_TZ:
        return moment
    return timezone.make_aware(moment, timezone.get_default_timezone())


def for_column(moment: datetime, alias: str) -> datetime:
    """An aware time for the alias's DateTimeFields: without USE_TZ only PostgreSQL has aware ones.

    Other databases get the naive time in UTC, which is what CURRENT_TIMESTAMP writes there.
    """
    if settings.USE_TZ or connections[alias].vendor == "postgresql":
        return moment
    return moment.astimezone(UTC).replace(tzinfo=None)
