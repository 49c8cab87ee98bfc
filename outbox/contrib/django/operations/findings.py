"""Stores the findings of the reconciliation in a table, which the admin shows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from django.db import models, router, transaction

from outbox.contrib.django.models import Finding
from outbox.contrib.django.settings.conf import for_column

MAX_SAVED: Final = 10_000
_BATCH: Final = 1_000


def replace(output: str, lines: Iterable[str]) -> int:
    """Replace the findings with this `output` by `lines`, one JSON text per finding; return the number of lines.

    The replacement is one transaction, so a reader sees either all previous findings or all new findings. Saving the
    same result again changes nothing.
    """
    alias = router.db_for_write(Finding)
    rows = [_row(output, json.loads(line), alias) for line in lines]
    with transaction.atomic(using=alias):
        Finding.objects.using(alias).filter(output=output).delete()
        Finding.objects.using(alias).bulk_create(rows, batch_size=_BATCH)
    return len(rows)


def _row(output: str, found: dict[str, Any], alias: str) -> Finding:
    if found.get("acknowledged"):
        found = {**found, "detail": f"acknowledged {found['acknowledged']}; {found['detail']}"}
    names = ("run", "rule", "group", "severity", "key", "detail", "message_id", "transaction_id", "row", "body")
    texts = {name: _fitting(name, found[name]) for name in names}
    times = {
        name: found[name] and for_column(datetime.fromisoformat(found[name]), alias) for name in ("at", "first_seen")
    }
    return Finding(output=output, finding_class=found["class"], **texts, **times)


def _fitting(name: str, value: str | None) -> str:
    """Return a text that fits the column. None becomes the empty text, and a text that is too long is cut.

    NUL characters are replaced, because PostgreSQL's type `text` cannot store them.
    """
    field = Finding._meta.get_field(name)
    assert isinstance(field, models.Field)
    return (value or "").replace("\0", "\N{REPLACEMENT CHARACTER}")[: field.max_length]
