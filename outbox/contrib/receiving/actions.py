"""The action on receivers: delete the state of those that are not configured any more."""

from __future__ import annotations

from outbox.contrib.django.actions.declaration import ActionPlan, Field, Values, action
from outbox.contrib.receiving.running import forget_receivers


@action(
    "forget",
    "Delete the state of receivers that are not in OUTBOX['RECEIVE'] any more",
    "outbox_receiver forget",
    Field("receivers", "receivers that are not in OUTBOX['RECEIVE'] any more", positional=True, many=True),
    permission=None,
)
def _forget(values: Values) -> ActionPlan:
    names = values["receivers"]
    return ActionPlan(
        subject=f"receivers {', '.join(names)}",
        effect=f"Delete the state of the receivers {', '.join(names)}. After that, no condition names these receivers.",
        nothing=not names,
        do=lambda: {"forgotten": forget_receivers(names)},
    )
