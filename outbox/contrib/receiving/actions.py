"""What operators see of receivers, and the action that deletes the state of those that are not configured any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from outbox.broker.operations.broker_conditions import PASS_LATE_PERIODS, late_passes
from outbox.broker.operations.conditions import NO_LIST, Concern, Declarations, Judged, Symptom
from outbox.broker.operations.state import BrokerState
from outbox.broker.transaction import turns
from outbox.contrib.django.actions.declaration import ActionPlan, Field, Values, action
from outbox.contrib.django.database.aliases import broker_executor

# The names of the turns that receivers take.
PASS_PREFIX: Final = f"receive{turns.OF_PART}"


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


def forget_receivers(names: Sequence[str]) -> int:
    """Delete the broker's records of receivers that the project no longer uses. Return the number of deleted records.

    Without a record of a receiver, no condition reports the receiver as late.
    """
    with broker_executor() as run:
        return sum(turns.forget(run, f"{PASS_PREFIX}{name}") for name in names)


CONDITIONS: Final = Declarations[BrokerState]()


@CONDITIONS.declare(
    meaning="A receiver of OUTBOX['RECEIVE'] has had no answer from its source for several periods, so it receives no "
    "messages.",
    next_step="Start `outbox_worker --role receive`. If it already runs, restore the server that its log names. If "
    "you no longer need the receiver, run `outbox_receiver forget NAME`.",
    concern=Concern.WAITING,
    symptom=Symptom.WAITING,
    thresholds=(PASS_LATE_PERIODS,),
    subject=("receiver",),
    shown=NO_LIST,
)
def receiver_late(state: BrokerState) -> Iterator[Judged]:
    for severity, fact in late_passes(state):
        name = str(fact["pass"])
        if name.startswith(PASS_PREFIX):
            rest = {key: value for key, value in fact.items() if key != "pass"}
            yield severity, {"receiver": name.removeprefix(PASS_PREFIX), **rest}
