"""The bundled broker: implements the interface `outbox.ports.Broker` on PostgreSQL.

Messages, end messages and checks go through a small pool of connections.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar
from uuid import UUID

import psycopg
from psycopg import errors as pg

from outbox.broker.database import notify
from outbox.broker.database.connection import BrokerConnection, BrokerDatabase, Pool
from outbox.broker.database.executor import Executor
from outbox.broker.database.one_way import OneWay
from outbox.broker.log import commit_log, recall, topics
from outbox.broker.log.failing import FailureNote, ProcessPart
from outbox.broker.log.topics import TopicCatalog
from outbox.broker.schema.install import check_schema
from outbox.broker.schema.refusals import refused
from outbox.broker.transaction import checks, decisions, fencing, half_scan, turns
from outbox.errors import BrokerError, BrokerUnavailable, SchemaError, SendFailed
from outbox.message import Message, SendReceipt
from outbox.recall import Recall
from outbox.topic import Topic
from outbox.transaction import Answer, Check, CheckSettings, EndStatus, EndTransaction, HalfTransaction, ProducerEpoch
from outbox.utils import faults
from outbox.utils.backoff import Backoff
from outbox.utils.safe_text import printable

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_ATTEMPTS: Final = 3
_BACKOFF: Final = Backoff(first_seconds=0.1, longest_seconds=1.0, factor=10)
_CHECK_SECONDS: Final = 60.0
# After one of the following errors, a second attempt of the request can succeed: the connection broke, the server stops
# or starts, or two statements collided.
_TRANSIENT: Final = (psycopg.OperationalError, psycopg.InterfaceError, pg.SerializationFailure, pg.DeadlockDetected)
# The following errors are subclasses of psycopg's OperationalError, but a second attempt of the request would fail in
# the same way.
_LASTING: Final = (pg.DiskFull, pg.OutOfMemory, pg.ProgramLimitExceeded)


class PostgresBroker:
    """A broker in a PostgreSQL database (implements outbox.ports.Broker). Thread-safe and fork-safe.

    This class attempts a request up to three times within the deadline of the request, with the same message ids. So
    each message is stored once, even if an acknowledgement is lost or the server restarts.
    """

    def __init__(
        self, database: BrokerDatabase, *, catalog: TopicCatalog | None = None, check: CheckSettings | None = None
    ) -> None:
        self.database = database
        self.catalog = catalog or TopicCatalog(database.schema)
        self._check = check or CheckSettings()
        self._pool = Pool(database)
        self._schema_known = False
        self._asked_for: set[str] = set()
        self._one_way = OneWay(database)
        # The FailureNote is stored after three failures in a row, because one or two failures may be caused by single
        # requests of the application.
        self._note = FailureNote(database, ProcessPart.PUBLISHING, in_a_row=3)
        self._wake = notify.announcement(database.schema, notify.Channel.DECIDED)

    def send(
        self,
        messages: Sequence[Message],
        *,
        timeout_seconds: float = 3.0,
        committed: bool = False,
        producer: ProducerEpoch | None = None,
    ) -> list[SendReceipt]:
        if not messages:
            return []

        def append(run: Executor) -> list[SendReceipt]:
            transactional = None if committed else False
            if producer is None:
                return commit_log.append_decided(run, self.catalog, messages, transactional=transactional)
            with run.connection.transaction():
                fencing.check_epoch(run, producer)
                return commit_log.append_decided(run, self.catalog, messages, transactional=transactional)

        receipts = self._publish(timeout_seconds, append, messages)
        self.notify_decided()
        return receipts

    def send_half(self, half: HalfTransaction, *, timeout_seconds: float = 3.0) -> list[SendReceipt]:
        return self._publish(timeout_seconds, partial(self._append_half, half), half.messages)

    def _append_half(self, half: HalfTransaction, run: Executor) -> list[SendReceipt]:
        default = self._check.immunity_seconds
        if half.producer is None:
            return commit_log.append_half(run, self.catalog, half, default_immunity_seconds=default)
        with run.connection.transaction():
            fencing.check_epoch(run, half.producer)
            receipts = commit_log.append_half(run, self.catalog, half, default_immunity_seconds=default)
            fencing.note_half(run, half.producer, half.transaction_id)
            return receipts

    def take_over(self, producer_group: str, transactional_id: str, *, timeout_seconds: float = 3.0) -> ProducerEpoch:
        return self._attempt(
            # The server waits at most `timeout_seconds`. The client waits 3 s longer, so that the server's answer can
            # still arrive.
            timeout_seconds + 3.0,
            lambda run: fencing.take_over(run, producer_group, transactional_id, timeout_seconds=timeout_seconds),
            what=lambda: f"taking over producer {transactional_id!r}",
        )

    def leftovers(self, producer: ProducerEpoch) -> list[UUID]:
        return self._attempt(
            _CHECK_SECONDS,
            lambda run: fencing.leftovers(run, producer, settings=self._check),
            what=lambda: f"the look-up of undecided transactions of producer {producer.transactional_id!r}",
        )

    def end(self, ends: Sequence[EndTransaction], *, timeout_seconds: float = 3.0) -> list[EndStatus]:
        if not ends:
            return []
        statuses = self._attempt(
            timeout_seconds,
            lambda run: decisions.record_ends(run, ends) if len(ends) > 1 else [decisions.record_end(run, ends[0])],
            what=lambda: f"{len(ends)} end messages",
        )
        self.notify_decided()
        return statuses

    def claim_checks(self, producer_group: str, *, limit: int = 500) -> list[Check]:
        """Claim due checks, after a scan for new undecided half messages.

        The first call of a process for a producer group also claims checks of parked transactions.
        """
        starts = producer_group not in self._asked_for
        claimed = self._attempt(
            _CHECK_SECONDS,
            lambda run: checks.claim_checks(run, producer_group, limit=limit, settings=self._check, starts=starts),
            what=lambda: f"checks of group {producer_group!r}",
        )
        self._asked_for.add(producer_group)
        faults.point("check.after_claim")
        return claimed

    def take_turn(
        self, producer_group: str, name: str, *, interval_seconds: float, rest_seconds: float | None = None
    ) -> bool:
        """Return whether this process should run a periodic pass of the group now; see `turns.take_turn`."""
        return self._attempt(
            _CHECK_SECONDS,
            lambda run: turns.take_turn(
                run, producer_group, name, interval_seconds=interval_seconds, rest_seconds=rest_seconds
            ),
            what=lambda: f"the request for the turn to run pass {name} of group {producer_group!r}",
        )

    def report_answers(self, producer_group: str, answers: Sequence[Answer]) -> list[EndStatus | None]:
        if not answers:
            return []
        faults.point("check.before_report")
        statuses = self._attempt(
            _CHECK_SECONDS,
            lambda run: checks.report_answers(run, producer_group, answers, settings=self._check),
            what=lambda: f"{len(answers)} answers of group {producer_group!r}",
        )
        self.notify_decided()
        return statuses

    def recall(self, message_ids: Sequence[UUID], *, timeout_seconds: float = 3.0) -> list[Recall]:
        return self._attempt(
            timeout_seconds,
            lambda run: recall.recall(run, message_ids),
            what=lambda: f"the recall of {len(message_ids)} messages",
        )

    def recall_key(self, topic: str, key: str, *, timeout_seconds: float = 10.0) -> list[Recall]:
        def request(run: Executor) -> list[Recall]:
            self.catalog.get(run.connection, topic)
            return recall.recall_key(run, topic, key)

        return self._attempt(timeout_seconds, request, what=lambda: f"the recall of key {key!r} of topic {topic!r}")

    def declare(self, declared: Sequence[Topic], *, timeout_seconds: float = 10.0) -> None:
        """Create missing topics, and change existing topics so that they agree with `declared` (see
        topics.declare_topics)."""
        self._attempt(
            timeout_seconds,
            lambda run: topics.declare_topics(run, declared),
            what=lambda: "the declaration of topics",
        )

    def topic(self, name: str, *, timeout_seconds: float = 3.0) -> Topic:
        """Return the topic from the catalog in memory; if the catalog is old, from the broker. Raises UnknownTopic."""
        return self._attempt(
            timeout_seconds,
            lambda run: self.catalog.get(run.connection, name).topic,
            what=lambda: f"the look-up of topic {name!r}",
        )

    def notify_decided(self) -> None:
        """Request that the sequencer runs soon; the method returns at once and raises no error."""
        self._one_way.send(self._wake)

    def end_one_way(self, end: EndTransaction) -> None:
        """Send an end message of a producer, and return at once without waiting for the answer; raises no error.

        Contradictions and refusals are recorded as incidents, as with `end`. If the end message is lost, check-back
        decides the transaction.
        """
        try:
            faults.point("producer.before_end")
            self._one_way.send(decisions.end_request(self.database.schema, end), self._wake)
            faults.point("producer.after_end")
        except Exception as error:
            logger.error(
                "the end message of %s was not sent; check-back will decide",
                end.transaction_id,
                exc_info=printable(error),
            )

    def hint_one_way(self, transaction_id: UUID) -> None:
        """Request an early check of one transaction, and return at once like `end_one_way`."""
        self._one_way.send(half_scan.hint_request(self.database.schema, transaction_id, settings=self._check))

    def flush(self, *, within_seconds: float) -> bool:
        """Wait for the answers to one-way requests; returns False if the time ran out before all answers arrived."""
        return self._one_way.flush(within_seconds=within_seconds)

    def close(self) -> None:
        """Flush one-way requests and close idle connections. The next call connects again."""
        self._one_way.close()
        self._pool.close()
        self._note.worked()

    def publishing_failed(self, error: Exception) -> None:
        """Record that an append failed. After three failures in a row, the status shows the failure."""
        self._note.failed(error)

    def publishing_worked(self) -> None:
        """Record a successful append. The method writes to the database only if an append has failed before."""
        self._note.worked()

    def _publish(
        self, timeout_seconds: float, append: Callable[[Executor], list[SendReceipt]], messages: Sequence[Message]
    ) -> list[SendReceipt]:
        try:
            receipts = self._attempt(timeout_seconds, append, what=partial(_described, messages))
        except (BrokerUnavailable, SendFailed, SchemaError) as error:
            self.publishing_failed(error)
            raise
        self.publishing_worked()
        return receipts

    def _attempt(
        self, timeout_seconds: float, request: Callable[[Executor], _Result], *, what: Callable[[], str]
    ) -> _Result:
        deadline = time.monotonic() + timeout_seconds

        def use(connection: BrokerConnection) -> _Result:
            if not self._schema_known:
                check_schema(connection, self.database.schema)
                self._schema_known = True
            return request(Executor(connection, self.database.schema))

        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._pool.lend(deadline, use)
            except (BrokerUnavailable, *_TRANSIENT) as error:
                # If the server was restarted, all earlier connections are broken.
                self._pool.clear()
                pause_seconds = _BACKOFF.pause_seconds(attempt)
                out_of_time = time.monotonic() + pause_seconds >= deadline
                if attempt == _ATTEMPTS or out_of_time or isinstance(error, _LASTING):
                    raise _unavailable(what(), error) from error
                logger.info("%s: trying again in %s s: %s", what(), pause_seconds, error)
                threading.Event().wait(pause_seconds)
            except psycopg.Error as error:
                raise self._refused(what(), error) from error
        raise AssertionError("unreachable")

    def _refused(self, what: str, error: psycopg.Error) -> BrokerError:
        named = refused(what, error, self.database.schema)
        # Every error that is not a SchemaError or BrokerUnavailable becomes SendFailed, because only this request has
        # failed.
        return named if isinstance(named, (SchemaError, BrokerUnavailable)) else SendFailed(str(named))


def _described(messages: Sequence[Message]) -> str:
    first = messages[0]
    more = f" and {len(messages) - 1} more" if len(messages) > 1 else ""
    return f"message {first.message_id} for topic {first.topic!r}{more}"


def _unavailable(what: str, error: Exception) -> BrokerError:
    if isinstance(error, BrokerUnavailable):
        return BrokerUnavailable(f"{what}: {error}")
    if isinstance(error, pg.DiskFull):
        return SendFailed(
            f"{what}: the disk of the broker's database is full ({error}). Nothing was stored. Free space on this disk."
        )
    return BrokerUnavailable(
        f"{what}: not completed within the deadline: {str(error).strip()}. The broker may have completed the "
        "request. Send the request again with the same message ids, so that no message is stored twice."
    )
