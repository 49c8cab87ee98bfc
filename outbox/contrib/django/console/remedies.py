"""The meaning and the remedy of each class of reconciliation findings, for the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Remedy:
    """The meaning of a class of findings, and the next step."""

    meaning: str
    settle: str


REMEDIES: Final[Mapping[str, Remedy]] = {
    "LOST": Remedy(
        "A business row without any message: no subscriber gets it.",
        "Find the code that writes the row without publishing, and correct it; publish from the row with "
        "`outbox-reconcile plan` and `outbox_repair`.",
    ),
    "ORPHAN": Remedy(
        "A committed message, or an effect, without a business row.",
        "See on the message's page how it was decided. Restore the row, or undo the effects of the groups.",
    ),
    "HALF_STUCK": Remedy(
        "A half message has been undecided for too long.",
        "See on the message's page why check-back found no answer; commit it if the row exists, else roll it back.",
    ),
    "DEAD": Remedy(
        "A consumer group gave the message up.",
        "Correct the handler, then replay the dead letter.",
    ),
    "UNDELIVERED": Remedy(
        "A consumer group shows no effect within its limit.",
        "See on the group's page whether it runs, waits or is stopped; if it passed the message without an effect, "
        "reset it and process again.",
    ),
    "DUPLICATE": Remedy(
        "More messages than rows, more rows than keys, or more effects than messages.",
        "Undo the surplus effect; look for a retry that publishes outside of the transaction of its row.",
    ),
    "MISMATCH": Remedy(
        "Row and message body differ.",
        "Publish the row's state as a new message if subscribers need it, or correct the row.",
    ),
    "UNREADABLE": Remedy(
        "The body of a committed message cannot be read as declared.",
        "If the message is right, correct the rule; else correct the publisher, and publish the row again.",
    ),
    "LATE": Remedy(
        "The message or the effect exists, but it is later than the limit that the rule declares.",
        "Nothing is missing: acknowledge it.",
    ),
    "RECOVERED": Remedy("A finding of the previous result that no longer holds.", "Nothing to do."),
    "EXPIRED": Remedy(
        "A finding of an earlier run can no longer be judged.",
        "Settle it by the business rows; if findings stay open for longer, raise the topic's retention.",
    ),
}
