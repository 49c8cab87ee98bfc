"""Times at the border to a project that may have USE_TZ = False; inside they are aware."""

from __future__ import annotations

from datetime import UTC, datetime

from django.conf import settings
from django.db import connections
from django.utils import timezone


def aware(moment: datetime) -> datetime:
    """A project's time: without USE_TZ a naive one is in TIME_ZONE, as everywhere in such a project.

    With USE_TZ a naive time stays one, to be refused.
    """
    if moment.tzinfo is not None or settings.USE_TZ:
        return moment
    return timezone.make_aware(moment, timezone.get_default_timezone())


def for_column(moment: datetime, alias: str) -> datetime:
    """An aware time as the alias's DateTimeFields take it: without USE_TZ only PostgreSQL has aware ones.

    The others get the naive time in UTC, which is what CURRENT_TIMESTAMP writes there.
    """
    if settings.USE_TZ or connections[alias].vendor == "postgresql":
        return moment
    return moment.astimezone(UTC).replace(tzinfo=None)
