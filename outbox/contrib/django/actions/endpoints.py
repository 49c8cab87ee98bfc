"""The action on endpoints of OUTBOX['FORWARD']: enable an endpoint that was disabled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outbox.contrib.django.actions.declaration import ActionField, ActionPlan, DeclaredAction, Values
from outbox.contrib.django.models import ForwardEndpoint
from outbox.contrib.django.operations.endpoints import enable, find_endpoint


def _enable(values: Values) -> ActionPlan:
    row = find_endpoint(values["group"])

    def do() -> Mapping[str, Any]:
        enable(row.group)
        return _state(find_endpoint(row.group))

    return ActionPlan(
        subject=f"endpoint {row.group}",
        effect=f"Enable endpoint {row.group}: its waiting messages are sent again within seconds. If the endpoint "
        "answers 410 again, it is disabled again.",
        before=_state(row),
        nothing=row.disabled_at is None,
        do=do,
    )


def _state(row: ForwardEndpoint) -> dict[str, Any]:
    return {"disabled": row.disabled_at is not None, "reason": row.disabled_reason}


ACTIONS: Final = (
    DeclaredAction(
        name="enable_endpoint",
        title="Enable an endpoint",
        command="outbox_endpoint enable",
        fields=(ActionField(name="group", required=True, positional=True, help="the entry of OUTBOX['FORWARD']"),),
        plan=_enable,
    ),
)
