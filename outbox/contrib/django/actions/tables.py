"""Actions on the tables: drop the broker, and settle what a comparison or an incident reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from outbox.broker.operations.broker_conditions import SETTLED_BY_OPERATORS, incidents_to_settle, settle_incidents
from outbox.broker.schema.install import DEFAULT_PATIENCE_SECONDS
from outbox.contrib.django.actions.declaration import ActionPlan, Field, FieldKind, Values, action
from outbox.contrib.django.database.aliases import on_broker
from outbox.contrib.django.operations.comparing import losses, settle_losses
from outbox.contrib.django.operations.installation import remove_broker, remove_part
from outbox.contrib.django.settings.conf import OutboxSettings, get_settings

_PATIENCE: Final = Field(
    "patience",
    "for how many seconds the command tries to lock tables that are in use (default: %(default).0f)",
    FieldKind.SECONDS,
    default=DEFAULT_PATIENCE_SECONDS,
)


@action(
    "drop_broker",
    "Remove the broker's tables with all messages",
    "outbox_install --drop",
    Field("force", "with --drop: also drop messages that are not delivered yet, or rows of the part", FieldKind.FLAG),
    Field("part", "with --drop: drop only the tables of this part, which no service uses any more"),
    _PATIENCE,
    permission=None,
)
def _drop(values: Values) -> ActionPlan:
    settings = get_settings()
    given = {"force": values["force"], "patience_seconds": values["patience"]}
    if values["part"]:
        return _drop_part(settings, values["part"], given)
    left = remove_broker(settings, **given, dry_run=True)
    return ActionPlan(
        subject=f"schema {settings.schema!r} on {settings.broker!r}",
        effect=f"Drop the broker's schema {settings.schema!r} on {settings.broker!r} with all messages. To keep "
        "`migrate` from creating the schema again, remove outbox from INSTALLED_APPS, or set OUTBOX['BROKER'] to "
        "another alias.",
        caution="This cannot be undone.",
        before={"lost": left},
        do=lambda: {"lost": remove_broker(settings, **given, dry_run=False)},
    )


def _drop_part(settings: OutboxSettings, part: str, given: Mapping[str, Any]) -> ActionPlan:
    rows = remove_part(settings, part, **given, dry_run=True)
    return ActionPlan(
        subject=f"part {part} in schema {settings.schema!r} on {settings.broker!r}",
        effect=f"Drop the tables of part {part!r} with all rows. A process that still has the part stops working.",
        caution="This cannot be undone.",
        before={"lost": rows},
        do=lambda: {"lost": remove_part(settings, part, **given, dry_run=False)},
    )


@action(
    "settle",
    "Mark the rows that comparisons report as missing, or the incidents of a condition, as settled, so that no "
    "condition names them",
    "outbox_audit settle",
    Field(
        "condition",
        "settle the incidents of this condition instead of missing rows (repeatable)",
        many=True,
        choices=tuple(SETTLED_BY_OPERATORS),
    ),
    permission=None,
)
def _settle(values: Values) -> ActionPlan:
    if values["condition"]:
        return _settle_conditions(list(dict.fromkeys(values["condition"])))
    left = losses()
    missing = sum(one.missing for one in left)
    return ActionPlan(
        subject="comparisons of ledgers and inboxes with the broker",
        effect=f"Mark {missing} missing rows as settled, so that the conditions no longer name them.",
        caution="This cannot be undone.",
        dangerous=True,
        before={"missing": {f"{one.kind.value} {one.subject}": one.missing for one in left}},
        nothing=not left,
        do=lambda: {"settled": settle_losses()},
    )


def _settle_conditions(names: Sequence[str]) -> ActionPlan:
    held = on_broker(incidents_to_settle)

    return ActionPlan(
        subject=f"conditions {', '.join(names)}",
        effect=f"End {', '.join(names)}: the incidents of now stay on the page Incidents, and no condition names them. "
        "A new incident raises the condition again.",
        before={name: held.get(name, 0) for name in names},
        nothing=not any(name in held for name in names),
        do=lambda: {"settled": on_broker(settle_incidents, names)},
    )
