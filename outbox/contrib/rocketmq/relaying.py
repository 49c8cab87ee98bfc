"""The relay: sends the messages of the table outbox_relay to RocketMQ, in the order of each line.

One relay per database works at a time: the one that holds the lease in `outbox_relay_lease`. It takes rows with an
UPDATE that has the lease as a condition, so PostgreSQL refuses a relay that has lost its lease. It sends the next
message of a line only after RocketMQ has confirmed the message before, and deletes the confirmed rows. So the first
copies of a line are in order, even if two relays send it at once. The lease only keeps duplicates rare.

A relay that dies before the DELETE leaves its rows. The next relay sends them again, with the same ids and in the same
order. A relay that freezes between the check of its lease and the send may send one message per line late. The other
relay has sent this message before, so it is a duplicate. See decision 290.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from django.db import connections
from django.db.models import Exists, F, Max, Q, QuerySet, Window
from django.db.models.functions import Now, RowNumber
from django.db.utils import DatabaseError, InterfaceError

from outbox.contrib.django.database.in_tests import refuse_processes_in_tests
from outbox.contrib.django.database.transactions import is_missing_table
from outbox.contrib.django.engine.broker import engine_of, get_broker, get_engine
from outbox.contrib.django.ledger.ledger_checker import ledger_aliases
from outbox.contrib.django.settings.conf import for_column, get_settings
from outbox.contrib.rocketmq.engine import RocketMQEngine
from outbox.contrib.rocketmq.relay_rows import message_of, rows_on
from outbox.errors import ConfigurationError
from outbox.ports import Broker
from outbox.utils import heartbeat
from outbox.utils.backoff import Backoff
from outbox.utils.faults import point
from outbox.utils.safe_text import error_line

if TYPE_CHECKING:
    from outbox.contrib.rocketmq.models import RelayEntry, RelayLease

logger = logging.getLogger(__name__)

# In one round the relay serves this number of lines, each with this number of messages. So a line with many messages
# delays the other lines by a few sends only.
LINES: Final = 128
MESSAGES_PER_LINE: Final = 16
# The bodies of one round. At least one message is read.
_ROUND_BYTES: Final = 16 * 1024 * 1024
_THREADS: Final = 16
# The pause after a round that took all waiting messages. No message wakes the relay, because a listening connection
# does not work behind every pooler.
_PAUSE_SECONDS: Final = 0.1
# The pause after an error of the database, and between two looks at the lease of another relay.
_LOOK_SECONDS: Final = 1.0
# The pause between two looks for the table of a database.
_TABLE_SECONDS: Final = 10.0
# A failed message is tried again after this pause.
_BACKOFF: Final = Backoff(first_seconds=0.5, longest_seconds=5.0)
_FIRST_LINE: Final = -(2**63) - 1
_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayCounts:
    """The counts of one round. `has_lease`: whether this relay was the one that works.

    `more`: whether the round may have left messages that can be sent now.
    """

    has_lease: bool = True
    sent: int = 0
    failed: int = 0
    parked: int = 0
    more: bool = False


@dataclass(slots=True)
class _LineResult:
    """What became of the messages of one line in one round."""

    confirmed: list[int]
    failed: RelayEntry | None = None
    error: Exception | None = None


class Relay:
    """The relay of one database.

    `rejects` says whether a failed message would be rejected again. The lease lasts `lease_seconds` after its last
    renewal; a send takes at most `send_seconds`.
    """

    def __init__(
        self,
        alias: str,
        broker: Broker,
        rejects: Callable[[Exception], bool],
        *,
        lease_seconds: float,
        send_seconds: float,
    ) -> None:
        self.alias: Final = alias
        self.holder: Final = uuid4()
        # A renewed lease must last for some sends.
        self.lease_seconds: Final = max(lease_seconds, 3 * send_seconds)
        self._send_seconds = send_seconds
        self._broker = broker
        self._rejects = rejects
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="outbox-relay")
        self._stopping = threading.Event()
        # Before this time (time.monotonic) no other relay can have the lease. The clock also runs while this process
        # is stopped.
        self._until = 0.0
        self._cursor = _FIRST_LINE

    def run_once(self) -> RelayCounts:
        """Send the first messages of the next lines, and return the counts. Raises the errors of the database."""
        if not self._renew():
            return RelayCounts(has_lease=False)
        point("relay.before_take")
        lines = self._next_lines()
        taken = self._take(lines) if lines else []
        if taken is None:
            return RelayCounts(has_lease=False)
        if not taken:
            return RelayCounts()
        point("relay.after_take")
        by_line: dict[int, list[RelayEntry]] = defaultdict(list)
        for row in taken:
            by_line[row.line].append(row)
        results = list(self._threads.map(self._send, by_line.values()))
        confirmed = [number for one in results for number in one.confirmed]
        if confirmed:
            point("relay.after_confirmation")
            rows_on(self.alias).filter(pk__in=confirmed).delete()
            point("relay.after_delete")
        failed = [(one.failed, one.error) for one in results if one.failed is not None and one.error is not None]
        parked = self._note(failed)
        is_full = len(lines) == LINES or any(len(rows) == MESSAGES_PER_LINE for rows in by_line.values())
        return RelayCounts(
            sent=len(confirmed),
            failed=len(failed) - parked,
            parked=parked,
            more=bool(confirmed) and (is_full or len(confirmed) < len(taken)),
        )

    def stop(self) -> None:
        """Let `run_once` begin no further send."""
        self._stopping.set()

    def close(self) -> None:
        """Give the lease back, so that another relay need not wait until it expires. Raises no error."""
        self._threads.shutdown()
        try:
            self._lease().filter(holder=self.holder).update(expires_at=Now())
        except (DatabaseError, InterfaceError) as error:
            logger.info("the lease of the relay on %r expires in %.0f s: %s", self.alias, self.lease_seconds, error)

    # -- the lease ------------------------------------------------------------------------------

    def _lease(self) -> QuerySet[RelayLease]:
        # A child process imports this module before Django is set up, so models cannot be imported with it.
        from outbox.contrib.rocketmq.models import RelayLease

        return RelayLease._base_manager.using(self.alias)

    def _renew(self) -> bool:
        """Renew the lease if half of it is over. Returns False while another relay has it."""
        now = time.monotonic()
        if now < self._until - self.lease_seconds / 2:
            return True
        if not self._acquire():
            self._until = 0.0
            return False
        if not self._until:
            logger.info("the relay of database %r sends, with lease %s", self.alias, self.holder)
        # The lease began later than `now`, so it ends later than `_until`.
        self._until = now + self.lease_seconds
        return True

    def _acquire(self) -> bool:
        lease = self._lease()
        free = lease.filter(Q(holder=self.holder) | Q(expires_at__lte=Now()))
        length = timedelta(seconds=self.lease_seconds)
        if free.update(holder=self.holder, expires_at=Now() + length):
            return True
        if lease.exists():
            return False
        expired = lease.model(holder=self.holder, expires_at=for_column(_LONG_AGO, self.alias))
        lease.bulk_create([expired], ignore_conflicts=True)
        return bool(free.update(holder=self.holder, expires_at=Now() + length))

    # -- rows -----------------------------------------------------------------------------------

    def _next_lines(self) -> list[int]:
        """The next lines with a message that can be sent. Lines that wait for an operator or a pause are left out.

        The lines are read in the order of their numbers, from where the last round ended, so that each has its turn.
        """
        found = self._lines_after(self._cursor)
        if not found and self._cursor != _FIRST_LINE:
            found = self._lines_after(_FIRST_LINE)
        self._cursor = found[-1] if len(found) == LINES else _FIRST_LINE
        return found

    def _lines_after(self, cursor: int) -> list[int]:
        rows = rows_on(self.alias) if cursor == _FIRST_LINE else rows_on(self.alias).filter(line__gt=cursor)
        lines = rows.values("line").annotate(due=Max("due_at"), parked=Max("parked_at"))
        return list(lines.filter(due__lte=Now(), parked=None).order_by("line").values_list("line", flat=True)[:LINES])

    def _take(self, lines: Sequence[int]) -> list[RelayEntry] | None:
        """Mark the first rows of these lines as taken, and return them; None if the lease is lost."""
        place = Window(RowNumber(), partition_by=F("line"), order_by=F("sequence").asc())
        first = rows_on(self.alias).filter(line__in=lines).annotate(place=place).filter(place__lte=MESSAGES_PER_LINE)
        numbers: list[int] = []
        size = 0
        # The first messages of all lines come before all second messages, so each line keeps its first messages.
        for number, its_size in first.order_by("place", "sequence").values_list("pk", "size"):
            size += its_size
            if numbers and size > _ROUND_BYTES:
                break
            numbers.append(number)
        chosen = rows_on(self.alias).filter(pk__in=numbers)
        mine = self._lease().filter(holder=self.holder, expires_at__gt=Now())
        if not chosen.filter(Exists(mine)).update(taken_at=Now()):
            # A recall may also have removed all rows. The next round reads the lease again.
            self._until = 0.0
            return None
        # A recall may have removed some of the rows before they were marked.
        return list(chosen.filter(taken_at__isnull=False).order_by("sequence"))

    def _send(self, rows: Sequence[RelayEntry]) -> _LineResult:
        """Send the messages of one line one after the other, until one fails."""
        result = _LineResult([])
        for row in rows:
            if self._stopping.is_set():
                break
            point("relay.before_send")
            if time.monotonic() + self._send_seconds >= self._until:
                # Without this check, a relay that was frozen would send after it has lost its lease.
                break
            point("relay.in_send")
            try:
                message = message_of(self.alias, row)
                self._broker.send([message], timeout_seconds=self._send_seconds, committed=True)
            except Exception as error:
                result.failed, result.error = row, error
                break
            point("relay.after_send")
            result.confirmed.append(row.pk)
        return result

    def _note(self, failed: Iterable[tuple[RelayEntry, Exception]]) -> int:
        """Postpone or park the rows whose message could not be sent. Returns the number of parked rows."""
        changed, parked = [], 0
        for row, error in failed:
            row.attempts += 1
            row.error = error_line(error)
            if self._rejects(error):
                parked += 1
                row.parked_at = Now()
                logger.error(
                    "RocketMQ rejects message %s for topic %r, and the later messages of key %r wait: %s. Run "
                    "`manage.py outbox_relay retry %s` after you have corrected the cause, or `discard`.",
                    row.message_id,
                    row.topic,
                    row.key,
                    error,
                    row.message_id,
                )
            else:
                row.due_at = Now() + timedelta(seconds=_BACKOFF.pause_seconds(row.attempts))
                if row.attempts == 1:
                    logger.warning(
                        "the relay could not send message %s for topic %r and tries again: %s",
                        row.message_id,
                        row.topic,
                        error,
                    )
            changed.append(row)
        if changed:
            rows_on(self.alias).bulk_update(changed, ["attempts", "error", "due_at", "parked_at"])
        return parked


def is_needed() -> bool:
    """Whether a declared topic has messages that wait for the relay. Raises ConfigurationError."""
    engine = engine_of(get_settings())
    return isinstance(engine, RocketMQEngine) and engine.needs_relay()


def run_relay_role(stop: threading.Event, names: Sequence[str] = ()) -> None:
    """Send the waiting messages of all databases of the project until `stop` is set.

    Raises ConfigurationError if the engine has no relay.
    """
    refuse_processes_in_tests()
    engine, settings = get_engine(), get_settings()
    if not isinstance(engine, RocketMQEngine):
        raise ConfigurationError(
            f"the engine {engine.refusals.engine} needs no relay: leave the role relay out (--outbox-roles, --role)."
        )
    engine.require()
    # The library of RocketMQ is an optional dependency.
    from outbox.rocketmq.broker import is_rejected

    relays = [
        Relay(
            alias,
            get_broker(),
            is_rejected,
            lease_seconds=settings.lease_seconds,
            send_seconds=settings.send_timeout_seconds,
        )
        for alias in ledger_aliases()
    ]
    try:
        _run(relays, stop)
    finally:
        for relay in relays:
            relay.close()
        connections.close_all()


def _run(relays: Sequence[Relay], stop: threading.Event) -> None:
    threading.Thread(target=_stop_with, args=(stop, relays), name="outbox-relay-stop", daemon=True).start()
    errors: dict[str, str] = {}
    due = dict.fromkeys((relay.alias for relay in relays), 0.0)
    while not stop.is_set():
        for relay in relays:
            if time.monotonic() >= due[relay.alias]:
                due[relay.alias] = time.monotonic() + _pause_after(relay, errors)
        heartbeat.beat(ready=not errors)
        stop.wait(max(0.0, min(due.values()) - time.monotonic()))


def _stop_with(stop: threading.Event, relays: Sequence[Relay]) -> None:
    stop.wait()
    for relay in relays:
        relay.stop()


def _pause_after(relay: Relay, errors: dict[str, str]) -> float:
    """Run one round, and return the seconds until the next one. An error of the database does not end the relay."""
    try:
        counts = relay.run_once()
    except (DatabaseError, InterfaceError) as error:
        connections[relay.alias].close()
        if isinstance(error, DatabaseError) and is_missing_table(error):
            # The alias may belong to another broker. Without the table, no message can wait there.
            logger.debug("the database %r has no table of the relay", relay.alias)
            return _TABLE_SECONDS
        text = str(error).strip()
        if errors.get(relay.alias) != text:
            logger.warning("the relay of database %r waits for its database: %s", relay.alias, text)
        errors[relay.alias] = text
        return _LOOK_SECONDS
    errors.pop(relay.alias, None)
    if counts.more:
        return 0.0
    return _PAUSE_SECONDS if counts.has_lease else _LOOK_SECONDS
