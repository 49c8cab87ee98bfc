"""The condition of the part `receiving`: a receiver has had no answer from its source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from outbox.broker.operations.broker_conditions import PASS_LATE_PERIODS, late_passes
from outbox.broker.operations.conditions import Concern, Declarations, Judged
from outbox.broker.operations.state import BrokerState
from outbox.broker.transaction import turns

# The names of the turns that receivers take.
PASS_PREFIX: Final = f"receive{turns.OF_PART}"

CONDITIONS: Final = Declarations[BrokerState]()


@CONDITIONS.declare(
    meaning="A receiver of OUTBOX['RECEIVE'] has had no answer from its source for several periods. outbox receives no "
    "messages from this source.",
    next_step="Start `outbox_worker --role receive`, or restore the server that the receiver's log names. If the "
    "receiver is gone for good, run `outbox_receiver forget NAME`.",
    concern=Concern.WAITING,
    thresholds=(PASS_LATE_PERIODS,),
    subject=("receiver",),
)
def receiver_late(state: BrokerState) -> Iterator[Judged]:
    for severity, fact in late_passes(state):
        name = str(fact["pass"])
        if name.startswith(PASS_PREFIX):
            rest = {key: value for key, value in fact.items() if key != "pass"}
            yield severity, {"receiver": name.removeprefix(PASS_PREFIX), **rest}
