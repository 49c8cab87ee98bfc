"""The meaning of each class, the first check and the remedy: for findings, the report and the documentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from .classify import FindingClass

_UUID: Final = "^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$"
_NAME: Final = "^[A-Za-z0-9_.%-]+$"
# Columns of a finding that may stand in a remedy, in braces.
_FILLED: Final = {"message_id": _UUID, "transaction_id": _UUID, "group": _NAME, "topic": _NAME}


@dataclass(frozen=True, slots=True)
class Remedy:
    """Sentences for people, with commands in backticks. `check` comes first; `settle` ends the finding."""

    meaning: str
    check: str
    settle: str

    @property
    def text(self) -> str:
        """Check and remedy, as the column `remedy` of a finding has them."""
        return f"Check first: {self.check} Then: {self.settle}"


REMEDIES: Final = {
    FindingClass.ORPHAN: Remedy(
        "A committed message, or an effect, without a business row: subscribers act on something that did not happen.",
        "was the row deleted, does it no longer satisfy the rule's when, or was the message committed by an operator "
        "(decided_by O)? `{trace}`",
        "restore the row, or undo what the groups did; a message that was sent cannot be taken back.",
    ),
    FindingClass.HALF_STUCK: Remedy(
        "A half message is parked or undecided for too long: no checker has told how its transaction ended.",
        "is the row there, and does a worker of the producer group run (`python manage.py outbox_status`)?",
        "`python manage.py outbox_transaction decide {transaction_id} commit`, if the row is there; else rollback.",
    ),
    FindingClass.LOST: Remedy(
        "A business row without any message: no subscriber gets it.",
        "was the row written without the outbox (SQL by hand, a bulk import, a restore), its message rolled back, or "
        "sent under another key (an ORPHAN beside it)?",
        "publish it again from the row (`outbox-reconcile plan`, then `python manage.py outbox_repair`), and close the "
        "way past it.",
    ),
    FindingClass.UNREADABLE: Remedy(
        "The body of a committed message, or a compared field of it, cannot be read as declared.",
        "which release sent it, and does the rule's field (body, type) match its body? `{trace}`",
        "correct the rule if the message is right; else correct the publisher and publish the row again.",
    ),
    FindingClass.DUPLICATE: Remedy(
        "More messages than rows, more rows than keys, or more effects than messages.",
        "does a retry publish again, outside of the transaction of its row? Does the handler write its effect in the "
        "transaction of the inbox? `{trace}`",
        "undo the surplus effect; a message that was sent twice stays so: `[[acknowledge]]` it.",
    ),
    FindingClass.DEAD: Remedy(
        "A consumer group gave the message up; it waits in the dead-letter queue.",
        "its error: `python manage.py outbox_dead_letter list {group}`.",
        "correct the handler, then `python manage.py outbox_dead_letter replay {group} {message_id}`.",
    ),
    FindingClass.UNDELIVERED: Remedy(
        "A consumer group shows no effect within its limit.",
        "does the group run, lag or stand still (`python manage.py outbox_group offsets {group}`)? How far the "
        "message got is in the finding.",
        "start or resume its consumers; where it is past the message, the handler did nothing: `python manage.py "
        "outbox_group reset {group} {topic} --to-time … --reprocess`.",
    ),
    FindingClass.MISMATCH: Remedy(
        "Row and message body differ.",
        "was the row edited after it was sent, past the outbox? Both values are in the finding.",
        "publish the row's state as a new message where subscribers need it, or correct the row.",
    ),
    FindingClass.LATE: Remedy(
        "As declared, but later than the declared limit.",
        "what held it: the times of the finding, and `python manage.py outbox_status`.",
        "nothing is missing: `[[acknowledge]]` it, or raise late_after (of a group: within) if the limit is too short.",
    ),
    FindingClass.RECOVERED: Remedy(
        "A finding of the previous result that has ended.", "nothing.", "nothing is to be done."
    ),
    FindingClass.EXPIRED: Remedy(
        "A subject left open by an earlier run can no longer be judged: retention may have removed its evidence.",
        "its former class (flags), and whether an operator settled it.",
        "settle it by the business rows; raise the topic's retention if findings stay open for longer.",
    ),
}


def with_remedies(findings: DataFrame, trace: str) -> DataFrame:
    """The findings with `remedy`: first check and settlement, with the finding's own ids in the commands."""
    remedy: Column = F.lit(None).cast("string")
    is_traceable = F.col("message_id").isNotNull()
    for name, known in REMEDIES.items():
        untraced = known.text.replace(" `{trace}`", "")
        text = F.when(is_traceable, known.text.replace("{trace}", trace)).otherwise(untraced)
        remedy = F.when(F.col("class") == name.value, text).otherwise(remedy)
    # Only values that are certainly ids or names, because people copy a command into a shell.
    for column, safe in _FILLED.items():
        filled = F.replace(remedy, F.lit(f"{{{column}}}"), F.col(column))
        remedy = F.when(F.col(column).rlike(safe), filled).otherwise(remedy)
    return findings.withColumn("remedy", remedy)
