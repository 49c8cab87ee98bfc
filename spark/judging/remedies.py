"""The meaning, the first check and the remedy of each class, as texts for findings, the report and the
documentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from ..rules.rule import FindingClass

UUID: Final = "^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$"
# The command that shows the way of a message.
TRACE: Final = "python manage.py outbox_message show {message_id}"
_NAME: Final = "^[A-Za-z0-9_.%-]+$"
# The end of the remedies that let a handler run again.
_REDELIVER: Final = (
    "`python manage.py outbox_message redeliver {message_id} --group {group}`. The handler then runs as a whole, so "
    "messages that it publishes are published a second time."
)
# The columns of a finding that a remedy may contain in braces, each with the pattern of a safe value.
_FILLED: Final = {"message_id": UUID, "transaction_id": UUID, "group": _NAME, "topic": _NAME}


@dataclass(frozen=True, slots=True)
class Remedy:
    """The texts about one class, with commands in backticks. `check` is the first check; `settle` is the step that ends
    the finding."""

    meaning: str
    check: str
    settle: str


REMEDIES: Final = {
    FindingClass.ORPHAN: Remedy(
        "A committed message, or an effect, without a business row: subscribers act on something that did not happen.",
        "was the row deleted or merged with another row, does it no longer satisfy the rule's when, does the message "
        "spell its key differently (zeros, spaces, case), or did an operator commit the message (decided_by O)? "
        "`{trace}`",
        "restore the row, or undo what the groups did. A message that was sent cannot be taken back: `[[acknowledge]]` "
        "the finding.",
    ),
    FindingClass.HALF_STUCK: Remedy(
        "A half message is parked, or undecided for too long: no check-back has found out how its transaction ended.",
        "does the business row exist, and does a worker of the producer group run (`python manage.py outbox_status`)?",
        "if the row is there, `python manage.py outbox_transaction decide {transaction_id} commit`; if it is not "
        "there, the same command with rollback. If the command says that the ledger proves no outcome, add --force.",
    ),
    FindingClass.LOST: Remedy(
        "A business row without a committed message: no subscriber gets it.",
        "was the row written without the outbox (SQL by hand, a bulk import, a restore)? Was its message rolled back, "
        "or sent under another key (then there is an ORPHAN with that key)?",
        "publish the message again from the row (`outbox-reconcile plan`, then `python manage.py outbox_repair`). "
        "Correct the code that writes rows without the outbox.",
    ),
    FindingClass.UNREADABLE: Remedy(
        "A run cannot read the body of a committed message, or a compared field of the body, as the rule declares it.",
        "which release sent the message, and do `body` and `type` of the rule's field match the body of the message? "
        "`{trace}`",
        "if the message is right, correct the rule; else correct the publisher, publish the row again, and "
        "`[[acknowledge]]` the finding, because the unreadable message stays.",
    ),
    FindingClass.DUPLICATE: Remedy(
        "More messages than rows, more rows than keys, or more effects than messages.",
        "does a retry publish again, outside of the transaction of its row? Does the handler write its effect in the "
        "transaction of the inbox? Were rows merged, or was the key given to another row? `{trace}`",
        "undo the surplus effect. A second message cannot be taken back: `[[acknowledge]]` the finding.",
    ),
    FindingClass.DEAD: Remedy(
        "A consumer group gave the message up; the message waits in the dead-letter queue.",
        "the error of the dead letter: `python manage.py outbox_dead_letter list {group}`.",
        "correct the handler, then `python manage.py outbox_dead_letter replay {group} {message_id}`.",
    ),
    FindingClass.UNDELIVERED: Remedy(
        "A consumer group shows no effect within the limit of the group.",
        "does the group run, lag or make no progress (`python manage.py outbox_group offsets {group}`)? The finding "
        "shows how far the message got.",
        "start or resume the group's consumers. If the group has passed the message, its handler wrote no effect: let "
        f"this group handle it again, with {_REDELIVER}",
    ),
    FindingClass.MISMATCH: Remedy(
        "Row and message body differ.",
        "was the row edited without the outbox after its message was sent, or does its column round the value? Both "
        "values are in the finding.",
        "correct the row. If the column only rounds, give the rule's field a `tolerance`. If the row is right and "
        "subscribers need it, publish its state as a new message. With "
        '`messages = "exactly_one"`, a DUPLICATE follows: `[[acknowledge]]` it.',
    ),
    FindingClass.WRONG_EFFECT: Remedy(
        "An effect has another value than its message.",
        "which release of the handler wrote the effect, and was the effect edited later? Both values are in the "
        "finding. `{trace}`",
        "correct the handler, and correct the effect. To let the handler write it anew, remove the effect, then "
        f"{_REDELIVER}",
    ),
    FindingClass.WRONG_SUM: Remedy(
        "The effects of a message do not add up to the value of the message.",
        "did a part fail, or did a retry write a part twice? Sum and value are in the finding. `{trace}`",
        "write the missing part, or undo the surplus part. If the handler writes all parts, remove them, then "
        f"{_REDELIVER}",
    ),
    FindingClass.EARLY: Remedy(
        "An effect is older than its business row, or than the time for which its message was delayed. Either the "
        "message did not cause the effect, or a time is wrong.",
        "is the row's time right? If `row_at` is younger than the effect but `message_at` is not, the time was changed "
        "later, or is a local time without its offset. Else: did other code write the effect, such as an import or a "
        "direct call of the handler? Do the clocks of the servers agree? `{trace}`",
        "correct a wrong time of the row; if only the clocks differ, raise the rule's grace. In both cases the effect "
        f"is right. Otherwise undo the effect, then {_REDELIVER}",
    ),
    FindingClass.LATE: Remedy(
        "The message or the effect exists, but it is later than the limit that the rule declares.",
        "is the row's time right, or was the row imported, or given an older time? Else look for the cause of the "
        "delay: see the times of the finding, and `python manage.py outbox_status`.",
        "nothing is missing: correct a wrong time, else `[[acknowledge]]` the finding. If the limit is too short, "
        "raise late_after (for a message) or the group's within (for an effect).",
    ),
    FindingClass.RECOVERED: Remedy(
        "A finding of the previous result that no longer holds.", "nothing.", "no action is needed."
    ),
    FindingClass.EXPIRED: Remedy(
        "A finding or a PENDING key of an earlier run can no longer be judged, because retention may have removed its "
        "messages.",
        "the finding's earlier class (in the column flags), and whether an operator has settled the finding.",
        "compare the business row with what the subscribers did, and correct what is wrong. If findings stay open for "
        "longer than the topic's retention, raise the retention.",
    ),
}

ACTED: Final = Remedy(
    "A business row without a committed message, although groups have acted on its key.",
    "was the message removed from the broker, or sent under another key (then there is an ORPHAN with that key)?",
    "do not publish the row again: the message would have another id, so these groups would act twice. Correct missing "
    "effects of other groups by hand, then `[[acknowledge]]` the finding.",
)


def is_acted() -> Column:
    """Whether a finding is a LOST with effects, which has the remedy ACTED."""
    return (F.col("class") == FindingClass.LOST.value) & (F.col("effects") > 0)


def with_remedies(findings: DataFrame) -> DataFrame:
    """Add the column `remedy` to the findings. The commands in a remedy contain the ids of its finding."""
    remedy: Column = F.lit(None).cast("string")
    is_traceable = F.col("message_id").isNotNull()
    of_classes = [(F.col("class") == name.value, known) for name, known in REMEDIES.items()]
    for applies, known in (*of_classes, (is_acted(), ACTED)):
        steps = f"Check first: {known.check} Then: {known.settle}"
        text = F.when(is_traceable, steps.replace("{trace}", TRACE)).otherwise(steps.replace(" `{trace}`", ""))
        remedy = F.when(applies, text).otherwise(remedy)
    # People copy a command into a shell. So only values that are certainly ids or names go into a command.
    for column, safe in _FILLED.items():
        filled = F.replace(remedy, F.lit(f"{{{column}}}"), F.col(column))
        remedy = F.when(F.col(column).rlike(safe), filled).otherwise(remedy)
    return findings.withColumn("remedy", remedy)
