"""The keys of OUTBOX for repairs of the reconciliation's findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outbox.contrib.django.settings.definition import dotted_paths, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class ReconciliationSettings:
    """The settings of `outbox.contrib.reconciliation`."""

    repair_publishers: Mapping[str, str] = setting(
        {},
        dotted_paths,
        bundled_only=True,
        section="observing",
        meaning="for each rule of a reconciliation, the dotted path of a function that creates the message of a row "
        "again ([repair](reconciliation/findings.md#repair))",
    )
