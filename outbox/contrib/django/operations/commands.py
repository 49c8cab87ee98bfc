"""The functions behind the commands, if they need more than one function of the broker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from outbox.broker.database.connection import Connection
from outbox.broker.database.executor import Executor
from outbox.broker.log import recall
from outbox.broker.log.topics import TopicCatalog, list_topics
from outbox.broker.operations import dead_letters, switches
from outbox.broker.operations.dead_letters import LetterSelection
from outbox.broker.operations.deletion import Loss
from outbox.broker.operations.queue_status import QueueStatus, list_queues
from outbox.broker.postgres import PostgresBroker
from outbox.broker.transaction.checks import find_undecided
from outbox.broker.transaction.half_scan import hint_checks, list_waiting
from outbox.contrib.django.database.aliases import broker_connection
from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.ledger.ledger_checker import LedgerChecker
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import ConfigurationError, UnknownTopic, UsageError
from outbox.memory import InMemoryBroker
from outbox.recall import Recall
from outbox.topic import Topic
from outbox.transaction import Answer, Check, DecidedBy, Decision, EndStatus, EndTransaction


@dataclass(frozen=True, slots=True)
class GroupLag:
    """One group in a line of the list."""

    group: str
    queues: int
    lag: int
    stopped: int
    blocked: int


def group_lags(connection: Connection, schema: str) -> list[GroupLag]:
    """Every group that stores positions."""
    by_group: dict[str, list[QueueStatus]] = {}
    for queue in list_queues(Executor(connection, schema)):
        by_group.setdefault(queue.group, []).append(queue)
    return [
        GroupLag(
            group,
            len(queues),
            sum(queue.lag for queue in queues),
            sum(queue.stopped is not None for queue in queues),
            sum(queue.blocked_by is not None for queue in queues),
        )
        for group, queues in by_group.items()
    ]


def describe_losses(losses: Sequence[Loss]) -> str:
    """The text for what a deletion removes."""
    lag, retrying, dead = (sum(getattr(one, name) for one in losses) for name in ("lag", "retrying", "dead"))
    return f"{lag} messages not consumed, {retrying} that are retried, {dead} dead letters"


def create_topic(name: str, *, dry_run: bool = False, **properties: Any) -> str:
    """Declare a new topic. Raises UsageError if it exists already."""
    with broker_connection() as (connection, schema):
        if name in {topic.name for topic in list_topics(Executor(connection, schema))}:
            raise UsageError(f"topic {name!r} exists already: `outbox_topic alter {name}` changes it.")
    topic = Topic(name=name, **properties)
    if dry_run:
        return f"topic {name} would be created."
    _declare(topic)
    return f"topic {name} was created."


def alter_topic(name: str, *, dry_run: bool = False, **changes: Any) -> str:
    """Change properties of a topic; the others stay. Raises UnknownTopic."""
    with broker_connection() as (connection, schema):
        known = {topic.name: topic for topic in list_topics(Executor(connection, schema))}
    if name not in known:
        raise UnknownTopic(f"topic {name!r} is not declared; use one of: {', '.join(sorted(known)) or 'none'}.")
    changed = replace(known[name], **changes)
    if changed == known[name]:
        return f"topic {name} already has these properties."
    if dry_run:
        return f"topic {name} would be changed."
    _declare(changed)
    return f"topic {name} was changed."


def _declare(topic: Topic) -> None:
    broker = get_broker()
    if not isinstance(broker, (PostgresBroker, InMemoryBroker)):
        raise ConfigurationError("the broker is RocketMQ: change its topics with `manage.py outbox_rocketmq --create`.")
    broker.declare([topic])


def replay_dead_letters(group: str, selection: LetterSelection, *, limit: int, dry_run: bool) -> int:
    """Replay dead letters of a group; returns their number.

    Raises UnknownGroup. Raises UsageError if one of the ids is not a dead letter of the group; then none is replayed.
    """
    count = _settle(dead_letters.replay, "replayed", group, selection, limit=limit, dry_run=dry_run)
    if not dry_run:
        broker = get_broker()
        if isinstance(broker, PostgresBroker):
            broker.notify_decided()
    return count


def discard_dead_letters(group: str, selection: LetterSelection, *, limit: int, dry_run: bool) -> int:
    """Discard dead letters of a group; returns their number. Raises as `replay_dead_letters`."""
    return _settle(dead_letters.discard, "discarded", group, selection, limit=limit, dry_run=dry_run)


def _settle(
    settle: Callable[..., int], done: str, group: str, selection: LetterSelection, *, limit: int, dry_run: bool
) -> int:
    with broker_connection() as (connection, schema):
        with connection.transaction(force_rollback=dry_run):
            count = settle(Executor(connection, schema), group, selection, limit=limit)
            ids = selection.message_ids
            if ids is not None and count != len(set(ids)):
                raise UsageError(
                    f"{count} of the {len(set(ids))} ids are dead letters of group {group!r} that meet the rest of "
                    f"the selection (or --limit is too low), so nothing was {done}: `outbox_dead_letter list "
                    f"{group}` lists them."
                )
    return count


def recall_messages(ids: Sequence[UUID], *, topic: str | None, key: str | None, dry_run: bool) -> list[Recall]:
    """Recall messages by their ids, or the waiting ones of a topic and key; one outcome for each.

    Raises UnknownTopic.
    """
    with broker_connection() as (connection, schema), connection.transaction(force_rollback=dry_run):
        run = Executor(connection, schema)
        if topic is None or key is None:
            return recall.recall(run, list(dict.fromkeys(ids)))
        TopicCatalog(schema).get(connection, topic)
        return recall.recall_key(run, topic, key)


def switch_group(group: str, *, paused: bool, dry_run: bool) -> int:
    """Pause a group, or resume it; returns the number of stopped queues that are released. Raises UnknownGroup."""
    with broker_connection() as (connection, schema):
        run = Executor(connection, schema)
        with connection.transaction(force_rollback=True) if dry_run else nullcontext():
            if not paused:
                return switches.resume(run, group)
            switches.pause(run, group)
            return 0


def switch_transactional(rejecting: bool | None, *, dry_run: bool) -> tuple[bool, bool]:
    """Refuse new transactional messages, or accept them again; None only reads the state.

    Returns whether they are refused now (in a dry run: would be), and whether that is a change.
    """
    with broker_connection() as (connection, schema), connection.transaction(force_rollback=dry_run):
        run = Executor(connection, schema)
        changed = rejecting is not None and switches.reject_transactional(run, rejecting)
        return switches.rejects_transactional(run), changed


def decide(transaction_id: UUID, decision: Decision, *, force: bool = False) -> EndStatus:
    """Apply an operator's decision about an undecided (mostly: parked) transaction.

    The ledger is read first. For a rollback its barrier runs, so that a late commit fails. Raises UsageError if the
    ledger does not agree, unless `force`; and if there is no such undecided transaction.
    """
    check = _undecided(transaction_id)
    if not force:
        answer = _asked(replace(check, may_write=decision is Decision.ROLLBACK))
        if answer.decision is not decision:
            raise _not_proven(check, decision, answer)
    end = EndTransaction(
        transaction_id=transaction_id,
        decision=decision,
        producer_group=check.producer_group,
        decided_by=DecidedBy.OPERATOR,
    )
    return get_broker().end([end])[0]


def ask_ledger(transaction_id: UUID) -> str:
    """The ledger's answer about an undecided transaction, as text; read only. Raises UsageError."""
    answer = _asked(replace(_undecided(transaction_id), may_write=False))
    return f"{answer.decision.name}: {answer.detail}" if answer.detail else answer.decision.name


def rehearse(transaction_id: UUID, decision: Decision, *, force: bool = False) -> str:
    """The evidence on which `decide` would rely; read only. Raises UsageError if `decide` would.

    For a rollback the ledger's barrier decides in the end. It writes, so it is only announced here.
    """
    check = _undecided(transaction_id)
    if force:
        return "the ledger would not be asked"
    answer = _asked(replace(check, may_write=False))
    if answer.decision is decision:
        return f"the ledger proves it: {answer.detail}"
    if decision is Decision.ROLLBACK and answer.decision is Decision.UNKNOWN and not answer.alarm:
        return f"the ledger's barrier would decide it: {answer.detail}"
    raise _not_proven(check, decision, answer)


def ask_again(
    ids: Sequence[UUID] = (), *, group: str | None = None, parked: bool = False, limit: int = 10_000, dry_run: bool
) -> list[UUID]:
    """Make undecided transactions due for a check now, wherever their producers run; returns them, oldest first.

    They are those in `ids`, else up to `limit` of a producer group (None: of all), optionally only the `parked` ones.
    Their group's next pass of check-back checks them. Raises UsageError if one of the ids is not undecided; then none
    is due.
    """
    settings = get_settings().check
    with broker_connection() as (connection, schema), connection.transaction(force_rollback=dry_run):
        run = Executor(connection, schema)
        wanted = sorted(set(ids)) or list_waiting(run, group, parked=parked, limit=limit)
        if hint_checks(run, wanted, settings=settings) != len(wanted):
            strangers = [one for one in wanted if find_undecided(run, one) is None]
            raise UsageError(
                f"no undecided transactions: {', '.join(map(str, strangers))}; no check was requested. "
                "`outbox_transaction list` lists the undecided ones, `outbox_trace ID` shows the outcome of one."
            )
    return wanted


def _undecided(transaction_id: UUID) -> Check:
    with broker_connection() as (connection, schema):
        check = find_undecided(Executor(connection, schema), transaction_id)
    if check is None:
        raise UsageError(
            f"{transaction_id} is not an undecided transaction: `outbox_trace {transaction_id}` shows its outcome."
        )
    return check


def _asked(check: Check) -> Answer:
    return next(iter(LedgerChecker().check_local_transactions([check])))


def _not_proven(check: Check, decision: Decision, answer: Answer) -> UsageError:
    return UsageError(
        f"{decision.name} of {check.transaction_id} is not what the ledger proves: {answer.detail}. If you know more "
        "than the ledger, `outbox_decide --force` does it: a wrong COMMIT delivers a message about an event that "
        "never happened, a wrong ROLLBACK loses a message."
    )
