"""What `migrate` does beside the tables of the models: the broker's schema, its topics, the ledger's identity."""

from __future__ import annotations

import logging
from typing import Any

from django.apps.registry import Apps
from django.apps.registry import apps as global_apps
from django.core.management import CommandError
from django.db import router

from outbox.broker.database.executor import Executor
from outbox.broker.log.topics import declare_topics
from outbox.broker.schema.install import install
from outbox.contrib.django.broker import reset_broker
from outbox.contrib.django.conf import OutboxSettings, get_settings
from outbox.contrib.django.databases import broker_database
from outbox.errors import OutboxError

logger = logging.getLogger(__name__)


def after_migrate(*, using: str, apps: Apps = global_apps, **options: Any) -> None:
    """Receiver of post_migrate, which Django also sends after a flush (and then without `apps`).

    Raises CommandError, which `migrate` and `flush` print as a message, where the broker's tables cannot be installed.
    """
    name_ledger(using, apps)
    settings = get_settings()
    if using == settings.broker and not settings.in_memory:
        try:
            install_broker(settings)
        except OutboxError as error:
            raise CommandError(str(error)) from error


def name_ledger(alias: str, apps: Apps) -> None:
    """Give the ledger an id if it has none: a flush took the rows it vouched for, so it is another ledger now."""
    try:
        identity = apps.get_model("outbox", "LedgerIdentity")
    except LookupError:
        # Migrated back to zero.
        return
    if router.allow_migrate_model(alias, identity):
        identity._base_manager.using(alias).get_or_create(singleton=True)


def install_broker(settings: OutboxSettings) -> None:
    """Install or upgrade the broker's tables and declare the topics of the settings. Idempotent."""
    database = broker_database(settings)
    with database.connect(name="outbox-install", direct=True) as connection:
        version = install(connection, settings.schema)
        declare_topics(Executor(connection, settings.schema), [declared.topic for declared in settings.topics.values()])
    logger.info("broker on %r: schema %r at version %d", settings.broker, settings.schema, version)
    # What the broker of this process knows about topics may be older.
    reset_broker()
