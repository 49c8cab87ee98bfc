"""Keeps other tables out of a database that only the broker uses."""

from __future__ import annotations

from typing import Any

from django.db import DEFAULT_DB_ALIAS
from django.db.models import Model

from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import ConfigurationError


class BrokerRouter:
    """For DATABASE_ROUTERS, when OUTBOX['BROKER'] names an alias that no model uses.

    `migrate --database=broker` then installs the broker there and nothing else.
    """

    def allow_migrate(self, db: str, app_label: str, model_name: str | None = None, **hints: Any) -> bool | None:
        """The broker's database takes no model's table; for other databases this router returns None."""
        try:
            return False if is_dedicated(db) else None
        except ConfigurationError:
            # Checks call the router too, and one of them reports the error in the settings. `migrate` starts with the
            # checks.
            return None

    def allow_relation(self, obj1: Model, obj2: Model, **hints: Any) -> bool | None:
        """Always None."""
        return None


def is_dedicated(alias: str) -> bool:
    """Whether the alias is the broker's and not the default one."""
    return alias == get_settings().broker and alias != DEFAULT_DB_ALIAS
