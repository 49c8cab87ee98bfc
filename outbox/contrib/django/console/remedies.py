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
        "A business row has no message, so no subscriber knows about the row.",
        "Find the code that writes the row without publishing, and correct the code. Publish a message for the row "
        "with `outbox-reconcile plan` and `outbox_repair`.",
    ),
    "ORPHAN": Remedy(
        "A committed message or an effect has no business row.",
        "The message's page shows how its transaction was decided. Restore the row, or undo the effects of the groups.",
    ),
    "HALF_STUCK": Remedy(
        "A half message has been undecided for too long.",
        "The message's page shows why check-back found no answer. If the row exists, commit the transaction, else roll "
        "it back.",
    ),
    "DEAD": Remedy(
        "The message is a dead letter of a consumer group.",
        "Correct the handler, then replay the dead letter.",
    ),
    "UNDELIVERED": Remedy(
        "A consumer group shows no effect within its limit.",
        "The group's page shows whether the group runs, waits or is stopped. If the group passed the message without "
        "an effect, reset the group so that it handles the message again.",
    ),
    "DUPLICATE": Remedy(
        "There are more messages than rows, several rows with one key, or more effects than messages.",
        "Undo the surplus effect. Look for a retry that publishes outside of the transaction of its row.",
    ),
    "MISMATCH": Remedy(
        "The business row and the message body differ.",
        "Publish the row's state as a new message if subscribers need it, or correct the row.",
    ),
    "UNREADABLE": Remedy(
        "The body of a committed message cannot be read as declared.",
        "If the message is right, correct the rule. Otherwise correct the publisher, and publish the row again.",
    ),
    "LATE": Remedy(
        "The message or the effect exists, but it is later than the limit that the rule declares.",
        "Nothing is missing: acknowledge the finding.",
    ),
    "RECOVERED": Remedy("The difference that the previous run found does not exist any more.", "Nothing to do."),
    "EXPIRED": Remedy(
        "A finding of an earlier run can no longer be judged.",
        "Look at the business rows to settle the finding. If findings stay open for longer than the topic's retention, "
        "raise the retention.",
    ),
}
