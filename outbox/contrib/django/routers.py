"""A database router that keeps the tables of all models out of a database that only the broker uses."""

from __future__ import annotations

from typing import Any

from django.db import DEFAULT_DB_ALIAS
from django.db.models import Model

from outbox import hooks
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import ConfigurationError


class BrokerRouter:
    """A router for DATABASE_ROUTERS of projects in which OUTBOX['BROKER'] names an alias that no model uses.

    With this router, `migrate --database=broker` installs only the broker in that database.
    """

    def allow_migrate(self, db: str, app_label: str, model_name: str | None = None, **hints: Any) -> bool | None:
        """Return False for the broker's database, so that no model gets a table there, and None for other databases."""
        try:
            return False if is_dedicated(db) else None
        except ConfigurationError:
            # Ignore an error in OUTBOX here, because Django also calls the router during the system checks. `migrate`
            # starts with these checks, and `check_settings` reports the error.
            return None

    def allow_relation(self, obj1: Model, obj2: Model, **hints: Any) -> bool | None:
        """Return None: this router has no opinion about relations."""
        return None


def is_dedicated(alias: str) -> bool:
    """Return whether the alias is that of the broker, or of a part's own tables, and not the default alias."""
    own = {get_settings().broker, *(hooks.resolved(path)() for path in hooks.own_databases)}
    return alias in own and alias != DEFAULT_DB_ALIAS
