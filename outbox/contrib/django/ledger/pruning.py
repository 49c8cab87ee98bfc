"""Pruning: ledger rows of transactions that the broker shows decided, and inbox rows past their retention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from django.db import router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseError

from outbox.broker.database.executor import Executor
from outbox.broker.operations.presence import unknown_transactions
from outbox.broker.schema.install import check_schema
from outbox.broker.schema.refusals import naming
from outbox.broker.transaction.checks import scan
from outbox.broker.transaction.decisions import standing_decisions
from outbox.broker.transaction.half_scan import undecided_below
from outbox.contrib.django.database.aliases import broker_database
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases, open_connection, settle
from outbox.contrib.django.settings.conf import OutboxSettings, get_settings
from outbox.contrib.django.settings.times import for_column
from outbox.errors import LedgerUnavailable

# Shorter than the broker keeps its decisions, longer than any end or check is in flight.
LEDGER_KEEP_SECONDS: Final = 3600.0
_BATCH: Final = 1000
# Per alias, where a pass that was cut short ended: rows that have to stay must not keep it from those behind them.
_resume: dict[str, UUID] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneCounts:
    """What one pruning pass removed."""

    ledger: int = 0
    inbox: int = 0


def run_prune(*, now: datetime | None = None, max_batches: int = 100) -> PruneCounts:
    """Remove ledger rows of transactions the broker shows decided, and inbox rows past their retention.

    Raises BrokerError, or LedgerUnavailable once every database that could be pruned is.
    """
    now = now or datetime.now(UTC)
    return PruneCounts(
        ledger=prune_ledgers(older_than=now - timedelta(seconds=LEDGER_KEEP_SECONDS), max_batches=max_batches),
        inbox=prune_inboxes(
            older_than=now - timedelta(seconds=get_settings().inbox_retention_seconds), max_batches=max_batches
        ),
    )


def prune_ledgers(*, older_than: datetime, max_batches: int = 100) -> int:
    """Remove ledger rows of transactions from before `older_than` that the broker shows decided.

    Rows of transactions that it has never seen belong to the engine that OUTBOX['BROKER'] named before: they are kept
    for as long as that one can ask (OUTBOX['INBOX_RETENTION_SECONDS']). First the ledger says from when on it is
    complete (`pruned_before`), then rows go: a check for an older transaction without a row is never answered by
    guessing.
    """
    settings = get_settings()
    if settings.in_memory:
        return 0
    if settings.is_rocketmq:
        return _prune_by_age(settings, max_batches)
    below = first_id_at(older_than)
    with (
        broker_database(settings).connect(name="outbox-prune") as broker,
        naming("pruning the ledgers", settings.schema),
    ):
        check_schema(broker, settings.schema)
        run = Executor(broker, settings.schema)
        if scan(run, settings=settings.check).more:
            # Undecided transactions may be among the half messages that nobody has scanned yet.
            return 0
        return _of_each_ledger(lambda alias: _prune_alias(alias, run, below, max_batches))


def _of_each_ledger(prune: Callable[[str], int]) -> int:
    """How many rows went. One database that cannot be pruned does not keep the others from it."""
    removed, failed = 0, {}
    for alias in ledger_aliases():
        try:
            removed += prune(alias)
        except DatabaseError as error:
            if _has_tables(alias):
                failed[alias] = error
    if not failed:
        return removed
    said = "; ".join(f"{alias!r}: {str(error).strip()}" for alias, error in failed.items())
    raise LedgerUnavailable(
        f"ledger and inbox could not be pruned ({said}); {removed} rows of the others were. Nothing is lost: it is "
        f"tried again at the next pass. Look after that database; for one that is a replica, let a router's "
        f"allow_migrate refuse the models of outbox."
    ) from next(iter(failed.values()))


def _has_tables(alias: str) -> bool:
    """False where the routers allow the tables and nobody made them: a broker's database of its own, when OUTBOX names
    another engine now."""
    from outbox.contrib.django.models import LedgerEntry

    try:
        with closing(open_connection(alias)) as connection:
            return LedgerEntry._meta.db_table in connection.introspection.table_names()
    except DatabaseError:
        return True


def _prune_alias(alias: str, run: Executor, below: UUID, max_batches: int) -> int:
    with closing(open_connection(alias)) as connection:
        return _prune_ledger(connection, run, below, max_batches)


def _prune_by_age(settings: OutboxSettings, max_batches: int) -> int:
    """Remove rows that no check asks about any more: RocketMQ shows no decisions, but it keeps no message that long.

    OUTBOX['INBOX_RETENTION_SECONDS'] outlasts the messages, here too.
    """
    below = _retained_from(settings)

    def prune(alias: str) -> int:
        removed = 0
        with closing(open_connection(alias)) as connection:
            if ledger.identity(connection) is None:
                return 0
            for _ in range(max_batches):
                batch = ledger.ids_between(connection, UUID(int=0), below, limit=_BATCH)
                if not batch:
                    break
                ledger.advance_pruned_before(connection, first_id_after(batch[-1]))
                removed += ledger.delete(connection, batch)
        return removed

    return _of_each_ledger(prune)


def _retained_from(settings: OutboxSettings) -> UUID:
    return first_id_at(datetime.now(UTC) - timedelta(seconds=settings.inbox_retention_seconds))


def _prune_ledger(connection: BaseDatabaseWrapper, run: Executor, below: UUID, max_batches: int) -> int:
    identity = ledger.identity(connection)
    if identity is None:
        return 0
    below = _lowest_open(connection, run, identity.ledger_id, below)
    removed = 0
    after = _resume.pop(connection.alias, UUID(int=0))
    foreign_below = min(below, _retained_from(get_settings()))
    for _ in range(max_batches):
        batch = ledger.ids_between(connection, after, below, limit=_BATCH)
        if not batch:
            break
        after = batch[-1]
        over = set(standing_decisions(run, batch))
        over |= unknown_transactions(run, [one for one in batch if one not in over and one < foreign_below])
        if over:
            ledger.advance_pruned_before(connection, first_id_after(max(over)))
            removed += ledger.delete(connection, sorted(over))
        if len(batch) < _BATCH:
            break
    else:
        _resume[connection.alias] = after
    return removed


def _lowest_open(connection: BaseDatabaseWrapper, run: Executor, ledger_id: UUID, below: UUID) -> UUID:
    """The first id below which every undecided transaction of the ledger has a row, at most `below`.

    The barrier gives one to those that nobody has asked about for long (parked ones): past `pruned_before` an absent
    row could not be answered for any more.
    """
    undecided = undecided_below(run, ledger_id, below, limit=_BATCH)
    open_ids = settle(connection, [half.transaction_id for half in undecided if not half.immune], ledger_id=ledger_id)
    open_ids.update(half.transaction_id for half in undecided if half.immune)
    if len(undecided) == _BATCH:
        open_ids.add(undecided[-1].transaction_id)
    return min(open_ids, default=below)


def prune_inboxes(*, older_than: datetime, max_batches: int = 100) -> int:
    """Remove inbox rows handled before `older_than`, in bounded deletes."""
    from outbox.contrib.django.models import InboxEntry

    def prune(alias: str) -> int:
        if not router.allow_migrate_model(alias, InboxEntry):
            return 0
        rows, removed = InboxEntry.objects.using(alias), 0
        for _ in range(max_batches):
            old = (
                rows.filter(handled_at__lt=for_column(older_than, alias))
                .order_by("handled_at")
                .values_list("pk", flat=True)[:_BATCH]
            )
            keys = list(old)
            if not keys:
                break
            removed += rows.filter(pk__in=keys).delete()[0]
        return removed

    return _of_each_ledger(prune)


def first_id_at(moment: datetime) -> UUID:
    """The least UUIDv7 of a moment: transaction ids are ordered by time."""
    return UUID(int=(int(moment.timestamp() * 1000) << 80) | 0x7 << 76 | 0x8 << 60)


def first_id_after(value: UUID) -> UUID:
    """The next id."""
    return UUID(int=value.int + 1)
