"""The bundled broker as the core's port: sends, ends and checks over a small pool of connections."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, TypeVar
from uuid import UUID

import psycopg
from psycopg import errors as pg
from psycopg.pq import TransactionStatus

from outbox import faults
from outbox.broker.database import notify
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase
from outbox.broker.log import commit_log, recall, topics
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.schema.install import check_schema, missing
from outbox.broker.transaction import checks, decisions
from outbox.errors import BrokerError, BrokerUnavailable, SendFailed, UsageError
from outbox.message import Message, SendReceipt
from outbox.topic import Topic
from outbox.transaction import Answer, Check, CheckSettings, EndStatus, EndTransaction, HalfTransaction

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_PAUSES_SECONDS: Final = (0.1, 1.0)
_CHECK_SECONDS: Final = 60.0
# The connection broke, the server goes down or comes up, or two statements met: a repetition can succeed.
_TRANSIENT: Final = (psycopg.OperationalError, psycopg.InterfaceError, pg.SerializationFailure, pg.DeadlockDetected)
# Part of OperationalError in psycopg, but repeating does not help.
_LASTING: Final = (pg.DiskFull, pg.OutOfMemory, pg.ProgramLimitExceeded)


class Pool:
    """Idle connections for reuse. Thread-safe; a forked child starts with none and never touches its parent's."""

    def __init__(self, database: BrokerDatabase, *, keep: int = 8) -> None:
        self._database = database
        self._keep = keep
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[BrokerConnection] = []

    @contextmanager
    def connection(self, deadline: float) -> Iterator[BrokerConnection]:
        """A connection in autocommit whose statements end by `deadline` (monotonic). A broken one is not kept."""
        connection = self._take() or self._database.open(timeout_seconds=deadline - time.monotonic())
        try:
            with connection.within(deadline):
                yield connection
        except UsageError:
            # Refused before or by a statement that is over: the connection is as good as before.
            self._give_back(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)

    def _take(self) -> BrokerConnection | None:
        if self._pid != os.getpid():
            notify.keep_inherited(self._idle)
            self._start_anew()
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: BrokerConnection) -> None:
        with self._lock:
            is_idle = connection.info.transaction_status == TransactionStatus.IDLE
            if is_idle and len(self._idle) < self._keep:
                self._idle.append(connection)
                return
        connection.close()

    def clear(self) -> None:
        """Close the idle connections."""
        if self._pid != os.getpid():
            return
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class PostgresBroker:
    """A broker in a PostgreSQL database (implements outbox.ports.Broker). Thread-safe and fork-safe.

    A request is attempted up to three times within its deadline, with the same message ids, so that a lost
    acknowledgement or a restart of the server neither loses nor doubles a message.
    """

    def __init__(
        self, database: BrokerDatabase, *, catalog: TopicCatalog | None = None, check: CheckSettings | None = None
    ) -> None:
        self.database = database
        self.catalog = catalog or TopicCatalog(database.schema)
        self._check = check or CheckSettings()
        self._pool = Pool(database)
        self._schema_known = False
        self._notifier = notify.Notifier(database)

    def send(self, messages: Sequence[Message], *, timeout_seconds: float = 3.0) -> list[SendReceipt]:
        """See Broker.send."""
        if not messages:
            return []
        receipts = self._attempt(
            timeout_seconds,
            lambda connection: commit_log.append_decided(connection, self.database.schema, self.catalog, messages),
            what=_described(messages),
        )
        self.notify_decided()
        return receipts

    def send_half(self, half: HalfTransaction, *, timeout_seconds: float = 3.0) -> list[SendReceipt]:
        """See Broker.send_half."""
        if half.immunity_seconds is None:
            # Stored with the half: whoever scans it, under whatever settings, gives it the same immunity.
            half = replace(half, immunity_seconds=self._check.immunity_seconds)
        return self._attempt(
            timeout_seconds,
            lambda connection: commit_log.append_half(connection, self.database.schema, self.catalog, half),
            what=_described(half.messages),
        )

    def end(self, ends: Sequence[EndTransaction], *, timeout_seconds: float = 3.0) -> list[EndStatus]:
        """See Broker.end."""
        if not ends:
            return []
        statuses = self._attempt(
            timeout_seconds,
            lambda connection: decisions.record_ends(connection, self.database.schema, ends),
            what=f"{len(ends)} end messages",
        )
        self.notify_decided()
        return statuses

    def claim_checks(self, producer_group: str, *, limit: int = 500) -> list[Check]:
        """See Broker.claim_checks. Looks for new undecided half messages first."""
        claimed = self._attempt(
            _CHECK_SECONDS,
            lambda connection: checks.claim_checks(
                connection, self.database.schema, producer_group, limit=limit, settings=self._check
            ),
            what=f"checks of group {producer_group!r}",
        )
        faults.point("check.after_claim")
        return claimed

    def report_answers(self, producer_group: str, answers: Sequence[Answer]) -> list[EndStatus | None]:
        """See Broker.report_answers."""
        if not answers:
            return []
        faults.point("check.before_report")
        statuses = self._attempt(
            _CHECK_SECONDS,
            lambda connection: checks.report_answers(
                connection, self.database.schema, producer_group, answers, settings=self._check
            ),
            what=f"{len(answers)} answers of group {producer_group!r}",
        )
        self.notify_decided()
        return statuses

    def hint_checks(self, transaction_ids: Sequence[UUID]) -> None:
        """Ask for an early, read-only check of these half transactions; errors are logged and ignored."""
        try:
            self._attempt(
                3.0,
                lambda connection: checks.hint_checks(
                    connection, self.database.schema, transaction_ids, settings=self._check
                ),
                what="a hint",
            )
        except BrokerError as error:
            logger.debug("a hint for %d checks was not stored: %s", len(transaction_ids), error)

    def recall(self, message_id: UUID, *, timeout_seconds: float = 3.0) -> bool:
        """Take back a decided message whose delivery time has not come; False when it is too late or unknown."""
        return self._attempt(
            timeout_seconds,
            lambda connection: recall.recall(connection, self.database.schema, message_id),
            what=f"the recall of message {message_id}",
        )

    def declare(self, declared: Sequence[Topic], *, timeout_seconds: float = 10.0) -> None:
        """Create topics or change them to what is declared (see topics.declare_topics)."""
        self._attempt(
            timeout_seconds,
            lambda connection: topics.declare_topics(connection, self.database.schema, declared),
            what="the declaration of topics",
        )

    def topic(self, name: str, *, timeout_seconds: float = 3.0) -> Topic:
        """The topic as the broker knows it, from the catalog where that is fresh. Raises UnknownTopic."""
        return self._attempt(
            timeout_seconds,
            lambda connection: self.catalog.get(connection, name).topic,
            what=f"the look-up of topic {name!r}",
        )

    def notify_decided(self) -> None:
        """Wake the sequencer soon; returns at once, never fails."""
        self._notifier.notify(notify.Channel.DECIDED)

    def close(self) -> None:
        """End the background thread and close idle connections. The broker may be used again."""
        self._notifier.close()
        self._pool.clear()

    def _attempt(self, timeout_seconds: float, request: Callable[[BrokerConnection], _Result], *, what: str) -> _Result:
        deadline = time.monotonic() + timeout_seconds
        pause = threading.Event()
        for pause_seconds in (*_PAUSES_SECONDS, None):
            try:
                with self._pool.connection(deadline) as connection:
                    if not self._schema_known:
                        check_schema(connection, self.database.schema)
                        self._schema_known = True
                    return request(connection)
            except (BrokerUnavailable, *_TRANSIENT) as error:
                # Connections of before a restart are all broken.
                self._pool.clear()
                out_of_time = pause_seconds is None or time.monotonic() + pause_seconds >= deadline
                if out_of_time or isinstance(error, _LASTING):
                    raise _unavailable(what, error) from error
                logger.info("%s: trying again in %s s: %s", what, pause_seconds, error)
                pause.wait(pause_seconds)
            except psycopg.Error as error:
                raise self._refused(what, error) from error
        raise AssertionError("unreachable")

    def _refused(self, what: str, error: psycopg.Error) -> BrokerError:
        if isinstance(error, (pg.UndefinedTable, pg.UndefinedColumn, pg.InvalidSchemaName)):
            return missing(self.database.schema)
        if isinstance(error, pg.ReadOnlySqlTransaction):
            return BrokerUnavailable(
                f"{what}: the broker's database is read-only (a replica, or its disk is nearly full). Nothing was "
                f"stored; connect to the primary."
            )
        if isinstance(error, pg.InsufficientPrivilege):
            return SendFailed(f"{what}: {error.diag.message_primary}. Grant the role the broker's producer rights.")
        return SendFailed(f"{what}: the broker's database refused it: {str(error).strip()}. Nothing was stored.")


def _described(messages: Sequence[Message]) -> str:
    first = messages[0]
    more = f" and {len(messages) - 1} more" if len(messages) > 1 else ""
    return f"message {first.message_id} for topic {first.topic!r}{more}"


def _unavailable(what: str, error: Exception) -> BrokerError:
    if isinstance(error, BrokerUnavailable):
        return BrokerUnavailable(f"{what}: {error}")
    if isinstance(error, pg.DiskFull):
        return SendFailed(
            f"{what}: the disk of the broker's database is full ({error}). Nothing was stored; free space."
        )
    return BrokerUnavailable(
        f"{what}: not carried out within the deadline: {str(error).strip()}. It may still have been stored; "
        f"sending it again with the same message ids is safe."
    )
