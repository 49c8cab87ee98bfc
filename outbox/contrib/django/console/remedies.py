"""What the classes of reconciliation's findings mean, and what settles them, on the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Remedy:
    """What a class of findings means, and what to do."""

    meaning: str
    settle: str


REMEDIES: Final[Mapping[str, Remedy]] = {
    "LOST": Remedy(
        "A business row without any message: no subscriber will hear of it.",
        "Find what wrote past the outbox and close that way; publish from the row with `outbox-reconcile plan` and "
        "`outbox_repair`.",
    ),
    "ORPHAN": Remedy(
        "A committed message, or an effect, without a business row.",
        "See on the message's page who decided it. Restore the row, or undo what the groups did.",
    ),
    "HALF_STUCK": Remedy(
        "A half message is undecided for too long.",
        "See on the message's page why nobody could say; commit it if the row is there, else roll it back.",
    ),
    "DEAD": Remedy(
        "A consumer group gave the message up.",
        "Mend the handler, then replay the dead letter.",
    ),
    "UNDELIVERED": Remedy(
        "A consumer group shows no effect within its limit.",
        "See on the group's page whether it runs, waits or stands still; rewind it with processing again where it "
        "went past without an effect.",
    ),
    "DUPLICATE": Remedy(
        "More messages than rows, more rows than keys, or more effects than messages.",
        "Undo the surplus effect; look for a retry that publishes outside of the transaction of its row.",
    ),
    "MISMATCH": Remedy(
        "Row and message body do not say the same.",
        "Publish the row's state as a new message where subscribers need it, or correct the row.",
    ),
    "UNREADABLE": Remedy(
        "The body of a committed message cannot be read as declared.",
        "Correct the rule if the message is right; else the publisher, and publish the row again.",
    ),
    "LATE": Remedy("As declared, but later than the declared limit.", "Nothing is missing: acknowledge it."),
    "RECOVERED": Remedy("A finding of the previous result that is none any more.", "Nothing is to be done."),
    "EXPIRED": Remedy(
        "What an earlier run left open can no longer be judged.",
        "Settle it by the business rows; raise the topic's retention if findings stay open for longer.",
    ),
}
