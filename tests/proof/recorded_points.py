"""The fault points at which a recorded process writes a line, with the ids that the step is about.

The ids are read from the variables of the function that passes the point, so nothing in the product records anything.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from tests.oracle.lines import write

POINTS: Final = (
    "producer.after_ledger",
    "producer.after_local_commit",
    "producer.before_end",
    "consumer.before_inbox_commit",
    "consumer.after_inbox_commit",
    "claim.in_step",
    "claim.after_step",
    "claim.before_commit",
    "claim.after_commit",
)


def write_down(point: str) -> None:
    """Write a line about this visit of the point. Called by `faults.point`."""
    found = sys._getframe(2).f_locals
    match point:
        case "producer.after_ledger":
            write("step", point=point, transaction=str(found["messages"][0].message_id))
        # An atomic transaction passes the point too, without a half message.
        case "producer.after_local_commit" if "half" in found:
            write("step", point=point, transaction=str(found["half"].transaction_id))
        case "producer.before_end":
            end = found["end"]
            write("step", point=point, transaction=str(end.transaction_id), decision=end.decision.value)
        case "consumer.before_inbox_commit" | "consumer.after_inbox_commit":
            write("step", point=point, group=found["self"].subscription.group, messages=_handled(found))
        case "claim.in_step" | "claim.after_step" | "claim.before_commit" | "claim.after_commit":
            claim = found["self"]._claim
            write("step", point=point, message=str(claim.message_id), token=claim.token)


def _handled(found: Mapping[str, Any]) -> list[str]:
    """The messages whose handlers have run in this transaction."""
    joined = found["shared"].handled if found["shared"] is not None else []
    return [str(one.message_id) for one in (*found["fresh"], *joined) if one.message_id not in found["failed"]]
