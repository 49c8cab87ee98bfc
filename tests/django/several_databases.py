"""As worker_settings, with further databases around the two that matter: a second ledger, and a replica."""

from __future__ import annotations

import os

from outbox.contrib.django.databases import database_from_url
from tests.django import worker_settings
from tests.django.worker_settings import *  # noqa: F403

DATABASES = {
    # The first one wherever all ledgers are read.
    "archive": database_from_url(os.environ["TEST_ARCHIVE_URL"]),
    **worker_settings.DATABASES,
    "replica": database_from_url(os.environ["TEST_DEFAULT_URL"], TEST={"MIRROR": "default"}),
}
