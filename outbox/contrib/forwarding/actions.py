"""The action that enables a disabled endpoint of OUTBOX['FORWARD'], and the list of all endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outbox.contrib.django.actions.cells import badge, error, group_link
from outbox.contrib.django.actions.declaration import ActionPlan, Button, Values, action, argument
from outbox.contrib.django.actions.listing import Column, Listing, States
from outbox.contrib.forwarding.endpoints import enable, find_endpoint, list_endpoints
from outbox.contrib.forwarding.models import ForwardEndpoint


@action(
    "enable_endpoint",
    "Enable an endpoint",
    "outbox_endpoint enable",
    argument("group", "the entry of OUTBOX['FORWARD']"),
    buttons={"endpoints": lambda one: [Button("Enable …", "good", {"group": one.group})] if one.disabled_at else []},
)
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


def _shown_state(one: ForwardEndpoint) -> list[object]:
    if one.disabled_at is None:
        return [badge("enabled", "good")]
    return [badge("disabled", "bad"), one.disabled_at, error(one.disabled_reason)]


_STATES: Final[States] = {
    "": ("All", lambda one: True),
    "enabled": ("Enabled", lambda one: one.disabled_at is None),
    "disabled": ("Disabled", lambda one: one.disabled_at is not None),
}
ENDPOINTS: Final = Listing(
    "endpoints",
    (
        Column("Endpoint", lambda one: group_link(one.group), "head"),
        Column("State", _shown_state),
    ),
    lambda run, asked: list_endpoints(),
    of_broker=False,
    command="outbox_endpoint list",
    help="list the endpoints",
    states=_STATES,
    json=("endpoint=group", "disabled_at", "disabled_reason"),
    address="endpoints/",
    title="Endpoints",
    menu=("Groups", "Endpoints"),
    caption="Endpoints",
    empty="No endpoint is in this state.",
    unused="No process of this project has forwarded messages.",
    key=lambda one: one.group,
)
