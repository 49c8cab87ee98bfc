"""Checks that a step of a repair plan is still needed, and then does the step.

Doing a step twice has the same effect as doing it once.

See decision 050.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from django.db import DataError, ProgrammingError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox.broker.operations.dead_letters import LetterSelection
from outbox.codec import REFERENCE_CONTENT_TYPE
from outbox.contrib.django.actions.declaration import ActionPlan
from outbox.contrib.django.actions.messages import settle_letters
from outbox.contrib.django.actions.transactions import decide
from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.publishing.publish import lock_keys
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.reconciliation import evidence
from outbox.contrib.reconciliation.plan import RepairAction, RepairStep, RuleSource
from outbox.errors import OutboxError, UsageError
from outbox.events.declaration import EVENT_HEADER, VERSION_HEADER, events
from outbox.message import Message
from outbox.transaction import Decision, EndStatus
from outbox.utils.faults import point
from outbox.utils.safe_text import error_line, masked_names, masked_value

Publisher = Callable[[Mapping[str, Any]], Message]
"""A function of your project: it gets a row, and returns the row's message.

The function gets the row's columns as a mapping, and makes the message with `outbox.contrib.django.message`.
"""

_SHOWN_BODY: Final = 1_000
_LIVE: Final = ("committed", "recalled")
_OPEN: Final = ("undecided", "parked")


class StepOutcome(enum.StrEnum):
    """The outcome of a step."""

    DONE = "done"
    WOULD_BE_DONE = "would be done"
    """The step was verified but not done, because the command ran without --apply."""
    SETTLED = "settled"
    """The finding of the step is no longer true, so there is nothing to do."""
    REFUSED = "refused"
    """The step cannot be done now. The detail of the result contains the reason."""
    REPORTED = "reported"
    """A person must do the step."""
    LEFT = "left"
    """The step was not examined, because the limit --most was reached."""


_FOR_PEOPLE: Final = (StepOutcome.REFUSED, StepOutcome.REPORTED)


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a step, with the evidence before and after the step.

    `content`: what would be published, for people only. The audit does not store it, because an erasure of a person's
    messages would not find it there.
    """

    outcome: StepOutcome
    detail: str
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    content: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishSources:
    """The data for steps that publish a message: sources and publishers by rule name, and aliases by database name."""

    sources: Mapping[str, RuleSource]
    aliases: Mapping[str, str]
    publishers: Mapping[str, Publisher]


def sources_of(
    steps: Iterable[RepairStep],
    sources: Mapping[str, RuleSource],
    aliases: Mapping[str, str],
    publishers: Mapping[str, Publisher],
    *,
    how: str,
) -> PublishSources:
    """The data for those of the steps that publish. `aliases`: by database name, where they differ from it.

    Raises UsageError if an alias is not a PostgreSQL database of the project. `how`: how to give another alias.
    """
    wanted = [sources[step.rule] for step in steps if step.action is RepairAction.PUBLISH]
    needed = {one for source in wanted for one in (source.database, *(each.database for each in source.effects))}
    found = {name: aliases.get(name, name) for name in needed}
    for name, alias in found.items():
        if alias not in connections or connections[alias].vendor != "postgresql":
            raise UsageError(
                f"the rules' database {name!r} is not a PostgreSQL alias of this project (it has the aliases "
                f"{', '.join(connections)}): {how.format(name=name)}"
            )
    return PublishSources(sources=sources, aliases=found, publishers=publishers)


class Refusal(Exception):
    """The step cannot be done; the text of the exception is the reason."""


def run_step(step: RepairStep, config: PublishSources, *, dry_run: bool) -> Result:
    """Verify one step, and do the step if `dry_run` is false.

    If the broker or a database refuses the step, the outcome is REFUSED.
    """
    try:
        if step.action is RepairAction.PUBLISH:
            return _publish(step, config, dry_run)
        if step.action is RepairAction.REPLAY:
            return _replay(step, dry_run)
        if step.action is RepairAction.ASK:
            return _ask(step, dry_run)
        return Result(StepOutcome.REPORTED, step.why or "")
    except Refusal as refusal:
        return Result(StepOutcome.REFUSED, str(refusal))
    except UsageError as error:
        return Result(StepOutcome.REFUSED, str(error))
    except (DataError, ProgrammingError) as error:
        return Result(StepOutcome.REFUSED, f"the row cannot be read with the rule's SQL: {str(error).strip()}")


def _subject_of(step: RepairStep) -> str:
    """The finding of a step, as the audit names it."""
    return f"{step.finding_class} {step.rule}, key {step.key}" + (f", group {step.group}" if step.group else "")


def planned(step: RepairStep, config: PublishSources, verified: Result, before: Mapping[str, Any]) -> ActionPlan:
    """The plan of the action that does a verified step. It verifies the step again while its locks are held."""
    is_settled = verified.outcome is StepOutcome.SETTLED

    def do() -> Mapping[str, Any]:
        point("repair.after_intent")
        done = run_step(step, config, dry_run=False)
        if done.outcome in _FOR_PEOPLE:
            raise UsageError(done.detail)
        return {"outcome": done.outcome.value, "detail": done.detail, **done.after}

    return ActionPlan(
        subject=_subject_of(step),
        effect=f"The finding is settled: {verified.detail}." if is_settled else f"Repair: {verified.detail}.",
        # The audit does not store the caution.
        caution=verified.content,
        before={**before, "step": step.step, **verified.before},
        nothing=is_settled,
        refusal=verified.detail if verified.outcome in _FOR_PEOPLE else "",
        do=do,
    )


# -- LOST: the message is published again -----------------------------------------------------------------


def derived_id(rule: str, key: str, row_at: datetime) -> UUID:
    """Return the id under which a row's message is published again. The id is computed from rule, key and row time.

    The id is a UUIDv7 with the row's time, because the reconciliation takes a message's time from its id. After
    retention has removed the message, only the inbox row remains. With the row's time, the reconciliation does not
    report this inbox row as an effect without a message.
    """
    digest = int.from_bytes(hashlib.blake2b(json.dumps(["repair", rule, key]).encode(), digest_size=10).digest())
    milliseconds = int(row_at.timestamp() * 1000) & (1 << 48) - 1
    high, low = digest >> 62 & 0xFFF, digest & (1 << 62) - 1
    return UUID(int=milliseconds << 80 | 0x7 << 76 | high << 64 | 0b10 << 62 | low)


def _publish(step: RepairStep, config: PublishSources, dry_run: bool) -> Result:
    assert step.row_at is not None
    source, publisher = config.sources[step.rule], config.publishers.get(step.rule)
    if publisher is None:
        raise Refusal(
            f"the function that makes the message of a row is not known: set OUTBOX['REPAIR_PUBLISHERS'], or pass "
            f"--publisher {json.dumps(step.rule)}=dotted.path to outbox_repair"
        )
    connection = connections[config.aliases[source.database]]
    with transaction.atomic(using=connection.alias):
        # This transaction locks the key until the message is stored. Until then, publishers of this key on a FIFO topic
        # and other runs of `apply` wait for the lock.
        lock_keys(connection, [(source.topic, step.key)])
        result = _settled(step, source, connection)
        if isinstance(result, Result):
            return result
        row, before = result
        _refuse_what_was_handled(step, source, config, connection)
        message_id = derived_id(step.rule, step.key, step.row_at)
        message = _built(publisher, row, step, source, message_id)
        _refuse_changed_key(step, source, message, connection)
        if dry_run:
            # A large body is stored anew under a new id each time that the publisher makes it.
            as_id = f" as {message_id}" if message.message_id == message_id else ", with a new id"
            what = f"publish to {source.topic!r}{as_id}"
            return Result(StepOutcome.WOULD_BE_DONE, what, before, content=_described(message))
        get_broker().send([message], committed=True)
        point("repair.after_effect")
        published = str(message.message_id)
        return Result(StepOutcome.DONE, f"published as {published}", before, {published: "committed"})


def _settled(
    step: RepairStep, source: RuleSource, connection: BaseDatabaseWrapper
) -> Result | tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the row and the evidence, or the result of the step if nothing is left to do. Raises Refusal."""
    assert step.row_at is not None
    message_id = derived_id(step.rule, step.key, step.row_at)
    rows = evidence.lock_row(connection, source, step.key)
    known = evidence.messages_of(source, step, step.row_at)
    before = {"rows": len(rows), "messages": {str(item.message_id): item.state for item in known}}
    if any(item.message_id == message_id and item.state in _LIVE for item in known):
        return Result(StepOutcome.SETTLED, f"published already, as {message_id}", before)
    if any(item.state in _LIVE for item in known):
        return Result(StepOutcome.SETTLED, "the broker now has a message of this key", before)
    if not rows:
        return Result(StepOutcome.SETTLED, "the row was deleted, or no longer satisfies the rule", before)
    waiting = [item for item in known if item.state in _OPEN]
    if waiting:
        raise Refusal(
            f"message {waiting[0].message_id} of this key is {waiting[0].state}: decide its transaction first"
        )
    if len(rows) > 1:
        raise Refusal("more than one row has this key")
    return rows[0], before


def _refuse_what_was_handled(
    step: RepairStep, source: RuleSource, config: PublishSources, connection: BaseDatabaseWrapper
) -> None:
    """Raise Refusal if the row's message may exist under another key, or if a group has already acted on the row.

    The inbox stores message ids. If a handled message were published under another id, a group would handle it twice.
    """
    assert step.row_at is not None
    misplaced = evidence.message_naming(connection, source, step, step.row_at)
    if misplaced is not None:
        raise Refusal(
            f"message {misplaced.message_id} ({misplaced.state}) has another key, and its body contains the key "
            "of this row. If it is the message of this row, publish nothing: correct the code that published it, and "
            "acknowledge the findings of both keys. If it is not, publish a message for this row by hand"
        )
    acted = [
        each.group
        for each in source.effects
        if evidence.has_effect(connections[config.aliases[each.database]], each, step.key)
    ]
    if acted:
        raise Refusal(
            f"{', '.join(acted)} acted on this key already, but the broker no longer has the message. A new "
            "message would have another id, so the group would act twice. Correct the missing effects of other "
            "groups by hand, then acknowledge the finding"
        )


def _refuse_changed_key(
    step: RepairStep, source: RuleSource, message: Message, connection: BaseDatabaseWrapper
) -> None:
    """Raise Refusal if the row's message was probably sent before the key of the row was changed."""
    assert step.row_at is not None
    found = evidence.message_under_former_key(connection, source, step, step.row_at, message)
    if found is not None:
        former, key = found
        raise Refusal(
            f"message {former.message_id} ({former.state}) has the key {key!r}, for which there is no row, and the "
            "body of this row but for the key. Probably the key of the row was changed after the message was sent, and "
            "the groups would act twice. If so, publish nothing, and acknowledge the findings of both keys. If it is "
            "another row's message, publish a message for this row by hand"
        )


def _built(
    publisher: Publisher, row: Mapping[str, Any], step: RepairStep, source: RuleSource, message_id: UUID
) -> Message:
    try:
        message = publisher(row)
    except OutboxError:
        raise
    except Exception as error:
        raise Refusal(f"the publisher failed: {error_line(error)}") from error
    if not isinstance(message, Message):
        raise Refusal(f"the publisher returned {type(message).__name__}, not a message made by message(…)")
    if (message.topic, message.key) != (source.topic, step.key) or source.tag not in (None, message.tag):
        raise Refusal(
            f"the publisher made a message for topic {message.topic!r}, key {message.key!r}, tag {message.tag!r}, "
            "which is not the missing message: correct the publisher"
        )
    _refuse_without_version(message)
    # The object of a large body has the name of the id with which its message was made.
    return message if message.content_type == REFERENCE_CONTENT_TYPE else replace(message, message_id=message_id)


def _refuse_without_version(message: Message) -> None:
    """Raise Refusal if subscribers would read the message as version 1 of an event that has a newer version."""
    newest = max((one for one in events() if one.topic == message.topic), key=lambda one: one.version, default=None)
    if newest is None or newest.version == 1 or EVENT_HEADER in message.headers:
        return
    kind = newest.kind.__qualname__
    raise Refusal(
        f"the publisher made a message without a type, which subscribers read as version 1 of the event "
        f"{newest.name!r}. Its newest version is {newest.version}: return message({kind}(…), key=…). If the body is of "
        f"version 1, pass the headers {EVENT_HEADER!r} and {VERSION_HEADER!r}"
    )


def _described(message: Message) -> str:
    """Describe the message with its body, in which the settings' masked fields are masked."""
    version = message.headers.get(VERSION_HEADER)
    typed = "" if version is None else f"event {message.headers.get(EVENT_HEADER)!r} version {version}, "
    names = masked_names(get_settings().masked_fields, message.topic)
    try:
        body = json.dumps(masked_value(json.loads(message.body), names), ensure_ascii=False)
    except (ValueError, RecursionError):
        body = "not shown" if names else message.body[:_SHOWN_BODY].decode("utf-8", "backslashreplace")
    shown = body if len(body) <= _SHOWN_BODY else f"{body[:_SHOWN_BODY]} …"
    return f"{typed}{len(message.body)} bytes of {message.content_type}: {shown}"


# -- DEAD: the message is replayed ------------------------------------------------------------------------


def _replay(step: RepairStep, dry_run: bool) -> Result:
    assert step.message_id is not None
    dead_at = evidence.dead_since(step.group, step.message_id)
    if dead_at is None:
        return Result(StepOutcome.SETTLED, "the message is no longer a dead letter")
    what, before = f"deliver {step.message_id} to {step.group!r} again", {"dead_at": dead_at}
    if dry_run:
        return Result(StepOutcome.WOULD_BE_DONE, what, before)
    only = LetterSelection(message_ids=[step.message_id])
    settle_letters(step.group, only, replay=True, limit=1, dry_run=False)
    point("repair.after_effect")
    return Result(StepOutcome.DONE, "the broker delivers the message again", before, {"dead_at": None})


# -- HALF_STUCK: the ledger is asked again -----------------------------------------------------------------


def _ask(step: RepairStep, dry_run: bool) -> Result:
    assert step.transaction_id is not None
    # A transaction may have an id that none of its messages has, so the message is found by its own id. A plan of an
    # older release may lack it; the id of a transaction is usually the id of its first message.
    half = evidence.message(step.message_id or step.transaction_id)
    if half is None or half.state not in _OPEN:
        state = "gone" if half is None else half.state
        return Result(StepOutcome.SETTLED, f"the half message is {state}", {"state": state})
    what, before = f"read the outcome of transaction {step.transaction_id} in its ledger", {"state": half.state}
    if dry_run:
        return Result(StepOutcome.WOULD_BE_DONE, what, before)
    decision, answers = _asked(step.transaction_id)
    point("repair.after_effect")
    if decision is None:
        raise Refusal(f"the ledger of the transaction does not prove an outcome: {answers}")
    return Result(
        StepOutcome.DONE,
        f"{decision.name}, which the ledger of the transaction proves",
        before,
        {"decision": decision.value},
    )


def _asked(transaction_id: UUID) -> tuple[Decision | None, str]:
    """Record the decision that the ledger proves.

    The function tries COMMIT before ROLLBACK, because the attempt to commit only reads the ledger.
    """
    answers = ""
    for decision in (Decision.COMMIT, Decision.ROLLBACK):
        try:
            status = decide(transaction_id, decision)
        except UsageError as error:
            answers = str(error)
            continue
        if status in (EndStatus.APPLIED, EndStatus.REPEATED):
            return decision, ""
        answers = f"the broker says {status.value} to {decision.name}"
    get_broker().hint_one_way(transaction_id)
    return None, answers
