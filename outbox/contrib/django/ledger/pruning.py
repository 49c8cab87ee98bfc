"""Removes ledger rows of decided transactions, inbox rows past their retention, and rows of parts.

A project that had another engine has ledger rows whose transactions this broker has never seen. They go when they are
older than `INBOX_RETENTION_SECONDS`: if they stayed, they would fill each pass, because they are the oldest. Before
rows go, `pruned_before` gets a higher id.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final
from uuid import UUID

from django.db import router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError

from outbox import hooks
from outbox.broker.database.executor import Executor
from outbox.broker.operations import presence
from outbox.broker.operations.presence import deliverable, unknown_transactions
from outbox.broker.schema.install import check_schema
from outbox.broker.schema.refusals import naming
from outbox.broker.transaction.checks import scan
from outbox.broker.transaction.decisions import flush, standing_decisions
from outbox.broker.transaction.half_scan import undecided_below
from outbox.contrib.django.database.aliases import broker_database
from outbox.contrib.django.ledger import handled, ledger
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases, open_connection, write_tombstones
from outbox.contrib.django.settings.conf import OutboxSettings, get_settings
from outbox.errors import LedgerUnavailable

# A ledger row is kept for at least this number of seconds. Usually, a transaction is decided in less time than this.
# The broker has to keep each decision for a longer time than this.
LEDGER_KEEP_SECONDS: Final = 3600.0
# Rows per statement. The locks of one statement last some tens of milliseconds, and many rows share one round trip.
_BATCH: Final = 5000
# The share of the time that sweeps may use to read a table again from its beginning.
_SWEEP_SHARE: Final = 0.05
_SHORT_SWEEP_SECONDS: Final = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneCounts:
    """The numbers of rows that one pruning pass removed.

    `of_parts` has the rows of parts, by table. `more` is true if the pass ended before it had examined all tables.
    """

    ledger: int = 0
    inbox: int = 0
    of_parts: Mapping[str, int] = field(default_factory=dict)
    more: bool = False


@dataclass(frozen=True, slots=True)
class _Part:
    """The result of a pruning pass on one table.

    The pass has examined all rows before `pruned_to`, or no rows if `pruned_to` is None.
    """

    removed: int = 0
    more: bool = False
    pruned_to: datetime | None = None


@dataclass(slots=True)
class _Sweep:
    """One sweep through a table.

    A sweep takes as many pruning passes as necessary, and examines each remaining row once. The sweep continues at the
    position `place`; None is the beginning of the table.
    """

    place: Any = None
    spent_seconds: float = 0.0
    rests_until: float | None = None


_sweeps: dict[tuple[str, str], _Sweep] = {}


@contextmanager
def _sweeping(alias: str, table: str) -> Iterator[_Sweep]:
    """Yield the current sweep of a table.

    After a sweep has reached the end of the table, it examines only rows that newly reach their retention time, until a
    new sweep may begin.
    """
    sweep = _sweeps.setdefault((alias, table), _Sweep())
    started = time.monotonic()
    if sweep.rests_until is not None and started >= sweep.rests_until:
        sweep = _sweeps[alias, table] = _Sweep()
    yield sweep
    sweep.spent_seconds += time.monotonic() - started


def _is_through(sweep: _Sweep) -> None:
    """Record that the sweep has reached the end of its table. After a long sweep, the next sweep begins later."""
    if sweep.rests_until is None:
        rest = sweep.spent_seconds / _SWEEP_SHARE if sweep.spent_seconds > _SHORT_SWEEP_SECONDS else 0.0
        sweep.rests_until = time.monotonic() + rest


def run_prune(*, now: datetime | None = None, max_seconds: float | None = None) -> PruneCounts:
    """Remove ledger rows of decided transactions, inbox rows past their retention, and rows of parts.

    The function ends when all tables are examined, or after about `max_seconds`. If tables remain, the next call in
    this process continues at the position that this call has reached. Each statement and each transaction covers at
    most some thousand rows. Raises BrokerError. If a database fails, the function prunes the other databases and then
    raises LedgerUnavailable.
    """
    now = now or datetime.now(UTC)
    share = None if max_seconds is None else max_seconds / 3
    kept = timedelta(seconds=get_settings().inbox_retention_seconds)
    steps: Sequence[Callable[..., PruneCounts]] = (
        partial(prune_ledgers, older_than=now - timedelta(seconds=LEDGER_KEEP_SECONDS)),
        partial(prune_inboxes, older_than=now - kept),
        prune_parts,
    )
    found: list[PruneCounts] = []
    failures: list[LedgerUnavailable] = []
    for step in steps:
        try:
            found.append(step(max_seconds=share))
        except LedgerUnavailable as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return PruneCounts(
        ledger=found[0].ledger,
        inbox=found[1].inbox,
        of_parts=found[2].of_parts,
        more=any(one.more for one in found),
    )


def prune_ledgers(*, older_than: datetime, max_seconds: float | None = None) -> PruneCounts:
    """Remove ledger rows of transactions before `older_than` that the broker shows as decided.

    If the broker does not know a transaction, the row belongs to the engine that OUTBOX['BROKER'] named before. Such a
    row is kept for as long as that engine can request a check (OUTBOX['INBOX_RETENTION_SECONDS']). Before this function
    removes rows, it stores in `pruned_before` the first id from which the ledger is still complete. So if an older
    transaction has no ledger row, the checker does not conclude that the transaction was rolled back.
    """
    settings = get_settings()
    if settings.in_memory:
        return PruneCounts()
    below = first_id_at(older_than) if settings.has_database else _retained_from(settings)
    with _broker(settings) as run:
        if run is not None and scan(run, settings=settings.check).more:
            # Remove nothing: a half message that the half scan has not read yet may belong to an undecided transaction.
            return PruneCounts()

        def prune(alias: str, ends: float) -> _Part:
            part = _prune_ledger(alias, run, below, ends)
            _report(run, settings, alias, presence.LEDGER, LEDGER_KEEP_SECONDS, part)
            return part

        if run is not None:
            presence.forget_other_aliases(run, settings.producer_group, ledger_aliases())
        found = _of_each(prune, max_seconds)
    return PruneCounts(ledger=found.removed, more=found.more)


@contextmanager
def _broker(settings: OutboxSettings) -> Iterator[Executor | None]:
    """A connection to the broker; None if it is not in PostgreSQL, so that it cannot be asked about single rows."""
    if not settings.has_database:
        yield None
        return
    with (
        broker_database(settings).connect(name="outbox-prune") as broker,
        naming("pruning ledgers and inboxes", settings.schema),
    ):
        check_schema(broker, settings.schema)
        yield Executor(broker, settings.schema)


def _report(
    run: Executor | None, settings: OutboxSettings, alias: str, table: str, keep_seconds: float, part: _Part
) -> None:
    if run is not None and part.pruned_to is not None:
        group = settings.producer_group
        presence.report_pruned(run, group, alias, table, keep_seconds=keep_seconds, pruned_to=part.pruned_to)


def _of_each(
    prune: Callable[[str, float], _Part], max_seconds: float | None, *, what: str = "ledger and inbox"
) -> _Part:
    """Call `prune` for every alias, and return the sum of the results. Each alias gets a share of `max_seconds`.

    If one database cannot be pruned, the function continues with the next database.
    """
    parts: list[_Part] = []
    failed: dict[str, DatabaseError] = {}
    aliases = ledger_aliases()
    for alias in aliases:
        ends = float("inf") if max_seconds is None else time.monotonic() + max_seconds / len(aliases)
        try:
            parts.append(prune(alias, ends))
        except DatabaseError as error:
            if has_tables(alias):
                failed[alias] = error
    total = _Part(sum(part.removed for part in parts), any(part.more for part in parts))
    if not failed:
        return total
    said = "; ".join(f"{alias!r}: {str(error).strip()}" for alias, error in failed.items())
    raise LedgerUnavailable(
        f"{what} could not be pruned ({said}); {total.removed} rows of the other databases were removed. Nothing is "
        "lost: the next pass tries again. Check the named database. If it is a replica, let a router's allow_migrate "
        "refuse the models of outbox."
    ) from next(iter(failed.values()))


def has_tables(alias: str) -> bool:
    """Return False if the routers allow the tables on this alias, but no migration has created them.

    After OUTBOX was changed to another engine, the former broker's own database has no such tables.
    """
    try:
        with closing(open_connection(alias)) as connection:
            return ledger.TABLE in connection.introspection.table_names()
    except DatabaseError:
        return True


def _retained_from(settings: OutboxSettings) -> UUID:
    return first_id_at(datetime.now(UTC) - timedelta(seconds=settings.inbox_retention_seconds))


def _prune_ledger(alias: str, run: Executor | None, below: UUID, ends: float) -> _Part:
    """Remove ledger rows with ids less than `below`, until the time `ends` (time.monotonic).

    If `run` is None, the function cannot ask the broker for decisions, and removes rows by age. The broker is then
    that of another engine, which keeps messages for a shorter time than OUTBOX['INBOX_RETENTION_SECONDS'].
    """
    with closing(open_connection(alias)) as connection, _sweeping(alias, presence.LEDGER) as sweep:
        identity = ledger.identity(connection)
        if identity is None:
            return _Part()
        if run is not None:
            below = _lowest_open(connection, run, identity.ledger_id, below)
        foreign_below = min(below, _retained_from(get_settings()))
        removed = 0
        while True:
            batch = ledger.ids_between(connection, sweep.place or UUID(int=0), below, limit=_BATCH)
            if batch:
                over = sorted(batch if run is None else _over(run, batch, foreign_below))
                if over:
                    ledger.advance_pruned_before(connection, first_id_after(over[-1]))
                    removed += ledger.delete(connection, over)
                sweep.place = batch[-1]
            if len(batch) < _BATCH:
                _is_through(sweep)
                return _Part(removed, False, moment_of(below))
            if time.monotonic() >= ends:
                return _Part(removed, True, moment_of(batch[-1]))


def _over(run: Executor, batch: Sequence[UUID], foreign_below: UUID) -> set[UUID]:
    """Return the transactions of a batch for which the broker can no longer request a check."""
    over = set(standing_decisions(run, batch))
    old = [one for one in batch if one < foreign_below and one not in over]
    if old:
        over |= unknown_transactions(run, old)
    if over:
        flush(run)
    return over


def _lowest_open(connection: BaseDatabaseWrapper, run: Executor, ledger_id: UUID, below: UUID) -> UUID:
    """Return an id that is at most `below`.

    Every undecided transaction of the ledger with a smaller id than the returned id has a ledger row. For transactions
    without a recent check (parked transactions), this function writes the row with the barrier. If the row were
    missing, the checker could no longer answer a check of a transaction with an id below `pruned_before`.
    """
    undecided = undecided_below(run, ledger_id, below, limit=_BATCH)
    open_ids = write_tombstones(
        connection, [half.transaction_id for half in undecided if not half.immune], ledger_id=ledger_id
    )
    open_ids.update(half.transaction_id for half in undecided if half.immune)
    if len(undecided) == _BATCH:
        open_ids.add(undecided[-1].transaction_id)
    return min(open_ids, default=below)


def prune_inboxes(*, older_than: datetime, max_seconds: float | None = None) -> PruneCounts:
    """Remove inbox rows handled before `older_than` whose group cannot get the message again.

    If the broker is not in PostgreSQL, the function removes rows by age, because it cannot ask other engines about a
    single message.
    """
    settings = get_settings()
    with _broker(settings) as run:

        def prune(alias: str, ends: float) -> _Part:
            part = _prune_inbox(alias, run, older_than, ends)
            _report(run, settings, alias, presence.INBOX, settings.inbox_retention_seconds, part)
            return part

        found = _of_each(prune, max_seconds)
    return PruneCounts(inbox=found.removed, more=found.more)


def _prune_inbox(alias: str, run: Executor | None, older_than: datetime, ends: float) -> _Part:
    from outbox.contrib.django.models import InboxEntry

    if not router.allow_migrate_model(alias, InboxEntry):
        return _Part()
    with closing(open_connection(alias)) as connection:
        part = _prune_rows(connection, run, handled.INBOX, older_than, ends)
        for table in () if part.more else handled.CLAIMS:
            _prune_rows(connection, run, table, older_than, ends)
        return part


def _prune_rows(
    connection: BaseDatabaseWrapper, run: Executor | None, table: handled.Table, older_than: datetime, ends: float
) -> _Part:
    """Remove rows before `older_than` whose group cannot get the message again, until the time `ends`."""
    removed = 0
    with _sweeping(connection.alias, table.name) as sweep:
        while True:
            batch = handled.oldest(connection, table, sweep.place, older_than=older_than, limit=_BATCH)
            if batch:
                gone = batch if run is None else _undeliverable(run, batch)
                removed += handled.delete(connection, table, gone, older_than=older_than)
                sweep.place = handled.place_behind(batch, is_stuck=not gone)
            if len(batch) < _BATCH:
                _is_through(sweep)
                return _Part(removed, False, older_than)
            if time.monotonic() >= ends:
                return _Part(removed, True, handled.moment_of(sweep.place))


def _undeliverable(run: Executor, batch: Sequence[handled.Handled]) -> list[handled.Handled]:
    stay = deliverable(run, [(row.group, row.generation, row.message_id) for row in batch])
    return [row for place, row in enumerate(batch) if place not in stay]


def prune_parts(*, max_seconds: float | None = None) -> PruneCounts:
    """Remove the rows that parts have given to pruning (`outbox.hooks.add_pruning`).

    If a table cannot be pruned, the function prunes the other tables, and then raises LedgerUnavailable.
    """
    removed: dict[str, int] = {}
    more = False
    failures: list[LedgerUnavailable] = []
    share = None if max_seconds is None else max_seconds / max(1, len(hooks.prunings))
    for table, path in hooks.prunings.items():
        try:
            found = _of_each(partial(_prune_part, hooks.resolved(path)), share, what=table)
        except LedgerUnavailable as error:
            failures.append(error)
            continue
        removed[table] = found.removed
        more = more or found.more
    if failures:
        raise failures[0]
    return PruneCounts(of_parts=removed, more=more)


def _prune_part(work: Callable[..., int], alias: str, ends: float) -> _Part:
    removed = 0
    with closing(open_connection(alias)) as connection:
        while True:
            deleted = work(connection, limit=_BATCH)
            removed += deleted
            if deleted < _BATCH:
                return _Part(removed)
            if time.monotonic() >= ends:
                return _Part(removed, more=True)


def first_id_at(moment: datetime) -> UUID:
    """Return the smallest UUIDv7 of a time. Transaction ids are ordered by time."""
    return UUID(int=(int(moment.timestamp() * 1000) << 80) | 0x7 << 76 | 0x8 << 60)


def moment_of(transaction_id: UUID) -> datetime:
    """Return the time at which the transaction began; its id contains this time."""
    return datetime.fromtimestamp((transaction_id.int >> 80) / 1000, UTC)


def first_id_after(value: UUID) -> UUID:
    return UUID(int=value.int + 1)
