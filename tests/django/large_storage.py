"""A storage of large bodies for tests, in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import psycopg
from django.conf import settings
from django.test.utils import override_settings

from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.large_bodies.orphans import remove_orphans

DECLARED: Final = {"storage": "large", "beyond_bytes": 1_000}
# Later than any object's `keep_seconds` ends.
LATER: Final = timedelta(days=365)


@contextmanager
def large_bodies(folder: Path, change_settings: Callable[..., None], **options: Any) -> Iterator[Path]:
    """Store bodies of more than 1,000 bytes below a folder."""
    backend = {"BACKEND": "django.core.files.storage.FileSystemStorage", "OPTIONS": {"location": str(folder)}}
    change_settings(LARGE_BODIES={**DECLARED, **options})
    with override_settings(STORAGES={**settings.STORAGES, "large": backend}):
        yield folder


def objects(folder: Path) -> dict[UUID, bytes]:
    """The contents of all objects, by the id of their message."""
    found = (path for path in (folder / "outbox").rglob("*") if path.is_file() and len(path.name) == 36)
    return {UUID(path.name): path.read_bytes() for path in found}


def referred() -> set[UUID]:
    """The messages whose body is a reference."""
    with psycopg.connect(alias_conninfo(get_settings().broker), autocommit=True) as connection:
        rows = connection.execute(
            "SELECT message_id FROM outbox.commit_log WHERE content_type = 'application/vnd.outbox.large'"
        ).fetchall()
    return {one for (one,) in rows}


def remove_a_year_later() -> int:
    """Run the pass as if a year had passed; return the number of removed objects."""
    remove_orphans()
    return remove_orphans(now=datetime.now(UTC) + LATER).removed
