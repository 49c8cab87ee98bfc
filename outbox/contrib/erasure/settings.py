"""The settings of erasures, and an environment variable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outbox.contrib.django.settings.conf import Variable
from outbox.contrib.django.settings.definition import any_text, or_none, setting, text


@dataclass(frozen=True, kw_only=True, slots=True)
class ErasureSettings:
    """The keys of OUTBOX that are about erasures."""

    erasure_list: str | None = setting(
        None,
        or_none(text("path")),
        bundled_only=True,
        word="erasure (GDPR)",
        meaning="path of the [list of erasures](operations/erasure.md#the-list-of-erasures), outside of the databases, "
        "or dotted path of a class that stores the list elsewhere",
        section="erasing",
    )
    erasure_secret: str | None = setting(
        None,
        or_none(any_text),
        bundled_only=True,
        secret=True,
        word="secret",
        meaning="secret with which the list of erasures hashes the erased keys. Keep it as long as you keep backups",
    )


ENVIRONMENT: Final = (
    Variable(
        "OUTBOX_ERASURE_SECRET",
        "you",
        "`outbox-reconcile archive --erase` needs `ERASURE_SECRET` of the settings in this variable",
    ),
)
