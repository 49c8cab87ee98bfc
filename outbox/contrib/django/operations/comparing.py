"""Compares the application's databases with the broker, to find what a restore of one side has removed.

There are three comparisons:

- The ledger has a row 'C', but the broker has no record of the row's transaction. The broker had stored the half
  message before the row's transaction committed. So the broker's database was restored to an earlier time, or a
  failover lost the message.
- The broker committed a transaction because its producer saw the row 'C'. The ledger no longer has this row, and
  pruning did not remove it. So the application's database was restored to an earlier time.
- The offset of a group has passed a message that did not fail, but the inbox of the group has no row of the message. So
  the database to which the handlers write was restored to an earlier time.

Each comparison reads only rows that are new since the last one, or all rows again if there is a sign of a restore: a
new life of the broker, or a missing row among the newest rows that both databases had at the last comparison.

See decision 171.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError

from outbox.broker.database.executor import Executor, Row
from outbox.broker.groups import lives
from outbox.broker.groups.lives import Life
from outbox.broker.operations import comparisons
from outbox.broker.operations.comparisons import (
    ComparisonKey,
    ComparisonKind,
    DatabaseComparison,
    GroupPosition,
    MissingTransactions,
)
from outbox.broker.operations.presence import unknown_transactions
from outbox.contrib.django.database.aliases import broker_executor, on_broker
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases, open_connection
from outbox.contrib.django.ledger.pruning import first_id_at, has_tables, moment_of
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers import inbox
from outbox.contrib.django.subscribers.inbox import handler_alias
from outbox.contrib.django.subscribers.registry import Subscriber, autodiscover
from outbox.errors import LedgerUnavailable
from outbox.filters.filter import parse_filter

logger = logging.getLogger(__name__)

COMPARE_INTERVAL_SECONDS: Final = 600.0
# A comparison also reads rows whose ids are older than the previous comparison by at most this time, because their
# transactions may have committed after the previous comparison.
_OVERLAP: Final = timedelta(minutes=15)
# For this long after the start of a new life of the broker, the ledger comparison reads all rows, because transactions
# that began before this life may still commit.
_YOUNG: Final = timedelta(hours=1)
_BATCH: Final = 5000
# One pass compares at most this many batches of each ledger.
_MOST_BATCHES: Final = 400
_CANARIES: Final = 20
_CANARIES_OF_QUEUE: Final = 5
# The first comparison of a group reads this many batches of a queue.
_FIRST_LOOK: Final = 20
_NIL: Final = UUID(int=0)


@dataclass(frozen=True, slots=True)
class CompareCounts:
    """The numbers of missing messages, commits and effects that one pass has found, in all databases of the project."""

    lost_messages: int = 0
    lost_commits: int = 0
    lost_effects: int = 0


def compare_when_due() -> CompareCounts | None:
    """Call `run_compare` if the broker has begun a new life, or if the last pass was ten minutes ago; else None."""
    if not get_settings().has_database:
        return None
    with broker_executor() as run:
        life, known = lives.current(run), comparisons.list_comparisons(run)
    since = datetime.now(UTC) - timedelta(seconds=COMPARE_INTERVAL_SECONDS)
    for one in map(known.get, _subjects()):
        if one is None or one.life_id != life or one.compared_at is None or one.compared_at < since:
            return run_compare()
    return None


def run_compare() -> CompareCounts:
    """Compare every ledger and inbox of the project with the broker, and store the findings for status and metrics.

    Raises BrokerError. If a database fails, raises LedgerUnavailable after the comparison of all other databases.
    """
    settings = get_settings()
    if not settings.has_database:
        return CompareCounts()
    failed: dict[str, DatabaseError] = {}
    with broker_executor() as run:
        context = _Context(
            run=run,
            life=lives.described(run),
            bounds=comparisons.bounds(run),
            known=comparisons.list_comparisons(run),
            producer_group=settings.producer_group or "",
            keep=timedelta(seconds=settings.inbox_retention_seconds),
        )
        # If a database had the tables at an earlier comparison, it was replaced, or its tables are lost.
        subjects = _subjects()
        compared = {key[-1] for key in subjects if key in context.known}
        for (kind, *_, alias), item in subjects.items():
            try:
                with closing(open_connection(alias)) as application:
                    if item is not None:
                        _compare_inbox(context, application, item)
                    elif kind is ComparisonKind.LEDGER:
                        _compare_ledger(context, application)
                    else:
                        _compare_decisions(context, application)
            except DatabaseError as error:
                if alias in compared or has_tables(alias):
                    failed[alias] = error
        counts = _counts(comparisons.list_comparisons(run), context.known)
    if failed:
        said = "; ".join(f"{alias!r}: {str(error).strip()}" for alias, error in failed.items())
        raise LedgerUnavailable(
            f"ledger and inbox could not be compared with the broker ({said}). No data is lost by this "
            "error. Make the named databases and their tables reachable: the next pass compares again."
        ) from next(iter(failed.values()))
    return counts


def settle_losses() -> int:
    """Mark all that this project's comparisons report as missing as settled by an operator; return its number."""
    return on_broker(_settle)


def _settle(run: Executor) -> int:
    known = comparisons.list_comparisons(run)
    settled = 0
    for one in (known[key] for key in _subjects() if key in known):
        if one.kind is not ComparisonKind.INBOX:
            settled += MissingTransactions(run, one.kind, one.subject, one.alias).settle()
            nothing = {"missing": 0, "first_at": None, "last_at": None, "ids": ()}
            comparisons.store(run, replace(one, **nothing, unproven_from=None, unproven_to=None))  # type: ignore[arg-type]
        elif one.missing:
            settled += one.missing
            comparisons.forget(run, one)
    return settled


def losses() -> list[DatabaseComparison]:
    """Return the last comparisons that found a loss, also those of other projects that use the broker."""
    return [one for one in on_broker(comparisons.list_comparisons).values() if not one.is_clean]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Context:
    run: Executor
    life: Life
    bounds: Row
    known: Mapping[ComparisonKey, DatabaseComparison]
    producer_group: str
    keep: timedelta

    @property
    def is_young(self) -> bool:
        """Return whether transactions that began before this life of the broker may still commit."""
        return self.life.began_at > datetime.now(UTC) - _YOUNG


def _subjects() -> dict[ComparisonKey, Subscriber | None]:
    """Return what the project compares: its ledgers, and the inboxes of these subscribers."""
    group = get_settings().producer_group
    aliases = ledger_aliases(usable=True) if group else []
    found: dict[ComparisonKey, Subscriber | None] = {
        (kind, group, "", alias): None for kind in (ComparisonKind.LEDGER, ComparisonKind.DECISION) for alias in aliases
    }
    for item in autodiscover():
        if item.idempotent and not item.subscription.broadcast:
            found[ComparisonKind.INBOX, item.subscription.group, item.subscription.topic, handler_alias(item)] = item
    return found


def _counts(
    now: Mapping[ComparisonKey, DatabaseComparison], before: Mapping[ComparisonKey, DatabaseComparison]
) -> CompareCounts:
    for key, one in now.items():
        known = before.get(key)
        if not one.is_clean and (known is None or known.missing != one.missing or known.is_clean):
            logger.error(
                "%s of %s on %r: %d are missing after a restore or a failover, with times from %s to %s; see "
                "outbox_status",
                one.kind,
                one.subject,
                one.alias,
                one.missing,
                one.first_at or one.unproven_from,
                one.last_at or one.unproven_to,
            )
    missing = {kind: sum(one.missing for one in now.values() if one.kind is kind) for kind in ComparisonKind}
    return CompareCounts(
        lost_messages=missing[ComparisonKind.LEDGER],
        lost_commits=missing[ComparisonKind.DECISION],
        lost_effects=missing[ComparisonKind.INBOX],
    )


# -- the ledger, and the broker's decisions -----------------------------------------------------------


def _batches(after: UUID, read: Callable[..., Sequence[UUID]]) -> Iterator[tuple[Sequence[UUID], str]]:
    """Yield the transactions after an id in batches, each with the id after which the next pass continues, or ''."""
    for _ in range(_MOST_BATCHES):
        batch = read(after, limit=_BATCH)
        if len(batch) < _BATCH:
            yield batch, ""
            return
        after = batch[-1]
        yield batch, str(after)


def _compare_ledger(context: _Context, application: BaseDatabaseWrapper) -> None:
    """Find committed rows of the ledger whose transactions the broker does not have."""
    identity = ledger.identity(application)
    if identity is None:
        return
    run, alias = context.run, application.alias
    known = context.known.get((ComparisonKind.LEDGER, context.producer_group, "", alias))
    missing = MissingTransactions(run, ComparisonKind.LEDGER, context.producer_group, alias)
    # Compare only ledger rows that are newer than `oldest`. The broker may have removed older transactions, or the
    # project may have used another engine for them. Pruning removes the ledger rows of such transactions by age.
    oldest = max(context.bounds.installed_at, datetime.now(UTC) - context.keep, context.bounds.kept_since or _LONG_AGO)
    same_ledger = known is not None and known.state.get("ledger") == str(identity.ledger_id)
    is_first = known is None or known.life_id != context.life.life_id or not same_ledger
    if known is None or is_first or context.is_young or known.compared_at is None:
        after = first_id_at(oldest)
    else:
        after = first_id_at(max(oldest, known.compared_at - _OVERLAP))
    if known is not None and not is_first and (left := known.state.get("after")):
        after = UUID(left)
    state = {"ledger": str(identity.ledger_id)}
    for batch, rest in _batches(after, partial(ledger.committed_after, application)):
        state["after"] = rest
        # The broker is read after the ledger, because the broker stored each half message before the row committed.
        missing.add({one: moment_of(one) for one in sorted(unknown_transactions(run, batch))})
    _look_again(missing, lambda ids: set(ids) - unknown_transactions(run, ids))
    missing.trim(keep_seconds=2 * context.keep.total_seconds())
    unproven: tuple[datetime | None, datetime] | None = _unproven(context, identity) if is_first else None
    if unproven is None and known is not None and known.unproven_to is not None:
        unproven = (known.unproven_from, known.unproven_to)
    _store(context, missing, state, unproven)


_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _unproven(context: _Context, identity: ledger.Identity) -> tuple[datetime, datetime] | None:
    """Return the time span of transactions that the broker has lost and whose ledger rows were already pruned.

    When pruning removed ledger rows, the broker had a decision for the last pruned transaction. If it no longer has
    this transaction, and the newest entry of its log is older, it was restored to an earlier time.
    """
    if identity.pruned_before is None or not context.is_young:
        return None
    last = UUID(int=identity.pruned_before.int - 1)
    until = context.life.stored_until or context.bounds.installed_at
    oldest = max(until, context.bounds.installed_at)
    if moment_of(last) <= oldest or not unknown_transactions(context.run, [last]):
        return None
    return oldest, moment_of(last)


def _compare_decisions(context: _Context, application: BaseDatabaseWrapper) -> None:
    """Find transactions that the ledger does not have, although the broker committed them because of a ledger row."""
    before = ledger.identity(application)
    if before is None or ledger.is_read_only(application):
        return
    run, alias = context.run, application.alias
    known = context.known.get((ComparisonKind.DECISION, context.producer_group, "", alias))
    missing = MissingTransactions(run, ComparisonKind.DECISION, context.producer_group, alias)
    after = max(before.pruned_before or _NIL, first_id_at(context.bounds.installed_at))
    canaries = [UUID(one) for one in known.state.get("canaries", ())] if known is not None else []
    same = known is not None and known.state.get("ledger") == str(before.ledger_id)
    is_whole = _absent(application, canaries) <= _below(canaries, after)
    if known is not None and same and known.compared_at is not None and is_whole:
        left = known.state.get("after")
        after = UUID(left) if left else max(after, first_id_at(known.compared_at - _OVERLAP))
    present: list[UUID] = []
    state: dict[str, Any] = {"ledger": str(before.ledger_id)}
    for batch, rest in _batches(after, partial(comparisons.committed_of_ledger, run, before.ledger_id)):
        state["after"] = rest
        absent = _absent(application, batch)
        # The pruning limit is read after the rows, because pruning records its limit before it removes rows.
        now = ledger.identity(application)
        if now is None or now.ledger_id != before.ledger_id:
            return
        missing.add({one: moment_of(one) for one in sorted(absent - _below(absent, now.pruned_before or _NIL))})
        present = [*present, *(one for one in batch if one not in absent)][-_CANARIES:]
    _look_again(missing, lambda ids: set(ids) - _absent(application, ids))
    state["canaries"] = [str(one) for one in present or canaries]
    _store(context, missing, state, None)


def _absent(application: BaseDatabaseWrapper, ids: Sequence[UUID]) -> set[UUID]:
    return set(ids).difference(ledger.states(application, ids))


def _below(ids: Collection[UUID], bound: UUID) -> set[UUID]:
    return {one for one in ids if one < bound}


def _look_again(missing: MissingTransactions, known_now: Callable[[Sequence[UUID]], set[UUID]]) -> None:
    after = _NIL
    while batch := missing.open(after, limit=_BATCH):
        missing.remove(sorted(known_now(batch)))
        after = batch[-1]


def _store(
    context: _Context,
    missing: MissingTransactions,
    state: dict[str, Any],
    unproven: tuple[datetime | None, datetime | None] | None,
) -> None:
    count, first, last, ids = missing.totals()
    began, ended = unproven or (None, None)
    comparisons.store(
        context.run,
        DatabaseComparison(
            kind=missing.kind,
            subject=missing.producer_group,
            alias=missing.alias,
            life_id=context.life.life_id,
            state=state,
            missing=count,
            first_at=first,
            last_at=last,
            ids=ids,
            unproven_from=began,
            unproven_to=ended,
        ),
    )


# -- the inbox ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Queue:
    """The state of one queue in the comparison of an inbox.

    The comparison ignores offsets below `valid_from`, and examines the offset `position` next. `moved` counts the
    entries that resets have skipped, less those that resets made the group read again. `look_from` is the lowest offset
    whose effect was missing.
    """

    valid_from: int
    position: int
    moved: int
    look_from: int | None = None


@dataclass(slots=True)
class _InboxLook:
    """One comparison of an inbox with the queues of a topic."""

    context: _Context
    application: BaseDatabaseWrapper
    item: Subscriber
    # Maps the id of a queue to the ids of its newest messages that have an inbox row.
    present: dict[int, list[UUID]] = field(default_factory=dict)
    missing: dict[UUID, datetime] = field(default_factory=dict)
    highest: int = -1

    def look(self, queue: GroupPosition, low: int, high: int) -> int | None:
        """Examine the offsets from `low` up to `high`; return the lowest offset whose effect is missing."""
        keep = (self.context.keep - _YOUNG).total_seconds()
        matches = parse_filter(self.item.subscription.filter)
        lowest: int | None = None
        for start in range(low, high, _BATCH):
            end = min(high, start + _BATCH)
            entries = [
                entry
                for entry in comparisons.finished_entries(self.context.run, queue, start, end, keep_seconds=keep)
                if matches.evaluate(entry.tag or "", entry.headers)
            ]
            # The inbox is read after the offset, because an effect commits before the consumer stores its offset.
            ids = [entry.message_id for entry in entries]
            there = inbox.handled(self.application, self.item.subscription.group, ids)
            for entry in entries:
                if entry.message_id not in there:
                    self.missing[entry.message_id] = entry.queued_at
                    lowest = entry.queue_offset if lowest is None else lowest
                    self.highest = max(self.highest, entry.queue_offset)
            if newest := [one.message_id for one in entries if one.message_id in there]:
                self.present[queue.queue_id] = newest[-_CANARIES_OF_QUEUE:]
        return lowest

    def look_back(self, queue: GroupPosition, low: int, high: int) -> int | None:
        """Like `look`, from `high` down to `low`, until a batch has no missing effect."""
        lowest: int | None = None
        newest: list[UUID] = []
        while high > low:
            start = max(low, high - _BATCH)
            found = self.look(queue, start, high)
            newest = newest or self.present.get(queue.queue_id, [])
            if found is None:
                break
            lowest, high = found, start
        if newest:
            self.present[queue.queue_id] = newest
        return lowest

    def present_from(self, queue: GroupPosition) -> int:
        """Return the first offset from which the inbox has a row for every message.

        Examine at most `_FIRST_LOOK` batches.
        """
        high = queue.next_offset
        for _ in range(_FIRST_LOOK):
            low = max(queue.floor, high - _BATCH)
            if low >= high:
                break
            lost = _InboxLook(self.context, self.application, self.item)
            lowest = lost.look(queue, low, high)
            self.present = lost.present | self.present
            if lowest is not None:
                return lost.highest + 1
            high = low
        return high


def _compare_inbox(context: _Context, application: BaseDatabaseWrapper, item: Subscriber) -> None:
    """Find messages that the group has passed without a failure, although the inbox has no row for these messages.

    The first comparison, also after a change of the filter, only finds the offset from which the inbox has a row for
    every message, because the group may have handled messages before it had an inbox. A message that an offset reset
    has skipped is never reported.
    """
    subscription = item.subscription
    group, topic, alias = subscription.group, subscription.topic, handler_alias(item)
    known = context.known.get((ComparisonKind.INBOX, group, topic, alias))
    positions = comparisons.group_positions(context.run, group, topic)
    state = known.state if known is not None and known.state.get("filter") == subscription.filter else {}
    queues = {int(key): _Queue(*values) for key, values in state.get("queues", {}).items()}
    canaries = {int(key): [UUID(one) for one in ids] for key, ids in state.get("canaries", {}).items()}
    look = _InboxLook(context, application, item)
    watched = [one for ids in canaries.values() for one in ids]
    gone = set(watched) - inbox.handled(application, group, watched)
    for queue in positions:
        seen = queues.get(queue.queue_id)
        if seen is None:
            # If a queue was created after the last comparison, the comparison reads all offsets of this queue.
            begin = queue.floor if state else look.present_from(queue)
            seen = queues[queue.queue_id] = _Queue(begin, queue.floor if state else queue.next_offset, queue.moved)
        if queue.moved > seen.moved:
            # An operator's offset reset has skipped the messages before `next_offset`.
            seen.valid_from = seen.position = queue.next_offset
            seen.look_from = None
        elif queue.moved < seen.moved:
            # The group has handled the messages from the target of the reset on, perhaps for the first time.
            begin = comparisons.read_again_from(context.run, queue)
            seen.valid_from, seen.position = min(seen.valid_from, begin), min(seen.position, begin)
        seen.moved = queue.moved
        seen.position = min(seen.position, queue.next_offset)
        low = max(queue.floor, seen.valid_from)
        found: list[int | None] = []
        if gone:
            found.append(look.look_back(queue, low, max(low, seen.position)))
        if seen.look_from is not None and not gone:
            found.append(look.look(queue, max(low, seen.look_from), max(low, seen.position)))
        found.append(look.look(queue, max(low, seen.position), queue.next_offset))
        lowest = [one for one in found if one is not None]
        seen.position, seen.look_from = queue.next_offset, min(lowest, default=None)
    kept = {key: [one for one in ids if one not in gone] for key, ids in canaries.items()}
    stored = {
        "filter": subscription.filter,
        "queues": {str(key): [one.valid_from, one.position, one.moved, one.look_from] for key, one in queues.items()},
        "canaries": {str(key): [str(one) for one in ids] for key, ids in (kept | look.present).items()},
    }
    times = sorted(look.missing.values())
    comparisons.store(
        context.run,
        DatabaseComparison(
            kind=ComparisonKind.INBOX,
            subject=group,
            topic=topic,
            alias=alias,
            life_id=context.life.life_id,
            state=stored,
            missing=len(look.missing),
            first_at=times[0] if times else None,
            last_at=times[-1] if times else None,
            ids=sorted(look.missing)[: comparisons.NAMED],
        ),
    )
