"""The settings of erasures."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.contrib.django.settings.definition import any_text, or_none, setting, text


@dataclass(frozen=True, kw_only=True, slots=True)
class ErasureSettings:
    """The keys of OUTBOX that are about erasures."""

    erasure_list: str | None = setting(
        None,
        or_none(text("path")),
        bundled_only=True,
        meaning="path of the [list of erasures](operations/erasure.md#the-list-of-erasures), outside of the databases, "
        "or dotted path of a class that stores the list elsewhere",
        section="erasing",
    )
    erasure_secret: str | None = setting(
        None,
        or_none(any_text),
        bundled_only=True,
        secret=True,
        meaning="secret with which the list of erasures hashes the erased keys. Keep it as long as you keep backups",
    )
