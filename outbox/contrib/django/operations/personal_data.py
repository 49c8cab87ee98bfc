"""How a person's data is removed from rows of an application's table: what it is about, and how rows are saved.

Each part names the functions that do this for its tables with `outbox.hooks.add_tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import models

from outbox.erased import ERASED_TEXT

Rows = models.QuerySet[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """What a removal is about: messages of a topic, a key, and texts."""

    topic: str
    message_ids: Sequence[UUID]
    transaction_ids: Sequence[UUID]
    key: str | None
    replacement: str | None
    texts: Sequence[str]
    # Says whether a key is meant, if only a hash of the key is known.
    is_listed: Callable[[str], bool] | None = None

    def is_key(self, text: str) -> bool:
        """Whether the removal is about this key."""
        return text == self.key or (self.is_listed is not None and self.is_listed(text))

    def mentions(self, text: str) -> bool:
        """Whether a text contains one of the texts."""
        return any(one in text for one in self.texts)

    def cleaned(self, value: Any) -> Any:
        """Return a text, or the texts inside of a JSON value, without the texts."""
        if isinstance(value, str):
            for one in self.texts:
                value = value.replace(one, ERASED_TEXT)
            return value
        if isinstance(value, Mapping):
            return {self.cleaned(name): self.cleaned(one) for name, one in value.items()}
        return [self.cleaned(one) for one in value] if isinstance(value, list) else value


def saved(rows: Rows, is_about: Callable[[Any], bool], values: Callable[[Any], Mapping[str, Any]]) -> int:
    """Change the rows for which `is_about` is true, and return their number."""
    count = 0
    for row in rows.iterator(chunk_size=500):
        if is_about(row):
            count += rows.filter(pk=row.pk).update(**values(row))
    return count
