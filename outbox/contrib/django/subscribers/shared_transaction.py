"""Several handler calls in one transaction: a savepoint for each message, and one COMMIT for all.

    BEGIN; inbox row 1        handler 1
    SAVEPOINT 2; inbox row 2  handler 2
    SAVEPOINT 3; inbox row 3  handler 3
    check of all inbox rows; COMMIT

A message joins the transaction only after the handler of the previous message has returned. Before the inbox row of the
joining message is written, a savepoint is set. So the transaction never has the inbox row of a message whose handler
has not run, even if a handler ends the transaction by hand. If a handler fails, the transaction is rolled back to the
savepoint of this handler's message, and the earlier messages commit. If the whole transaction fails, all its messages
run again, each in a transaction of its own. The attempt of a message counts as failed only if its handler raised an
error that no other message can have caused.

See decision 198.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context, copy_context
from typing import Any, Final, Protocol
from uuid import UUID

from django.db import Error as DjangoDatabaseError
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import Error as DriverError
from psycopg import pq

from outbox.contrib.django.database.django_internals import set_rollback_cause
from outbox.contrib.django.database.transactions import BlockTraces, sync_pipeline, watch_of
from outbox.errors import LeaseLost
from outbox.message import Delivery
from outbox.ports import Disposition, MoreCalls, RunAlone
from outbox.utils.causes import causes
from outbox.utils.safe_text import printable, shown_text

logger = logging.getLogger(__name__)

Result = Disposition | Exception | RunAlone

# A handler that has joined a transaction waits for a lock for at most this time (milliseconds). After this time, the
# transaction commits without the effects of this handler, and the handler runs alone with the usual limit. Without this
# short limit, two shared transactions that need the same rows in different orders would wait for PostgreSQL's
# deadlock_timeout (1 s).
LOCK_MILLISECONDS: Final = 20
# A statement of such a handler takes at most this time (milliseconds), for the same reason: a statement that hangs must
# not delay the earlier messages. This limit does not apply to COMMIT: the server ends it before it begins to commit.
STATEMENT_MILLISECONDS: Final = 500


class Inbox(Protocol):
    """The inbox rows of the transaction (InboxEntries)."""

    def join(self, number: int, delivery: Delivery) -> bool:
        """Set savepoint `number` and write the inbox row of a delivery. Return whether the row is new."""

    def is_whole(self) -> bool:
        """Whether the transaction can still commit, as far as the client knows."""

    def roll_back_to(self, number: int) -> None:
        """Undo everything that was done after savepoint `number`."""

    def still_there(self, deliveries: Sequence[Delivery]) -> set[UUID]:
        """Return the messages whose rows are committed."""


class Traces:
    """Watches for actions of a handler that the next handler in the same transaction could notice."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self._watch = watch_of(connection)
        self._watch.traces = self._found = BlockTraces()
        self._elsewhere = self._written_elsewhere()

    def _written_elsewhere(self) -> int:
        others = connections.all(initialized_only=True)
        return sum(watch_of(other).written for other in others if other.alias != self._connection.alias)

    @property
    def has_conflicts(self) -> bool:
        """Whether the database stopped a statement, even if the handler has caught the error.

        The watch does not see errors of `callproc` and of fetching from a server-side cursor, but Django notes them.
        """
        return self._found.has_conflicts or self._connection.errors_occurred

    def why_never(self) -> str:
        """Return why the handler must commit alone from now on; '' if it need not."""
        if self._found.has_key_locks:
            return (
                "it publishes to a FIFO topic or with an option that locks, and holds the lock until the common COMMIT"
            )
        if self._written_elsewhere() != self._elsewhere:
            return "it writes to another database, and these writes do not wait for the common COMMIT"
        return ""

    @property
    def is_clean(self) -> bool:
        """Whether the next handler could notice nothing of the handlers before it except their writes."""
        return not self._found.lasting and not self.has_conflicts


class SharedTransaction:
    """The messages that join the transaction of a first message, after the handler of the first has returned.

    Make the object before the first handler runs, because it watches that handler too. Messages that join are added to
    `joined`. `clean`: the context variables before the first handler runs.
    """

    def __init__(
        self,
        connection: BaseDatabaseWrapper,
        inbox: Inbox,
        more: MoreCalls,
        name: str,
        joined: list[Delivery],
        clean: Context,
    ) -> None:
        self._connection = connection
        self._inbox = inbox
        self._more = more
        self._traces = Traces(connection)
        self._name = name
        self._clean = clean
        # The on_commit callbacks of each message, as Django keeps them; the first list is that of the first message.
        self._callbacks: list[list[Any]] = []
        # All messages that have joined, and those of them whose handlers have returned without an error.
        self.joined = joined
        self.handled: list[Delivery] = []
        # For each message that has joined: the context (contextvars) at the end of its handler, in which its callbacks
        # run. So the log records and the traces of the callbacks belong to their own message.
        self._contexts: list[Context] = []
        # The ids (`id`) of the deliveries that were handled before.
        self._skipped: set[int] = set()
        # For each message that has joined: its result, if the transaction commits.
        self.results: list[Result] = []
        # The error of the handler that failed last.
        self._error: Exception | None = None

    def extend(self, handle: Callable[[Delivery], Exception | None]) -> None:
        """Run further messages in the transaction, one after the other. `handle` calls the handler.

        After a message that must run alone, or whose handler has failed, no further message joins.
        """
        # Each message has a context of its own, as if it had not joined.
        while self._may_go_on() and self._clean.copy().run(self._join_next, handle):
            pass

    def _join_next(self, handle: Callable[[Delivery], Exception | None]) -> bool:
        """Run the next message, if there is one. Return whether another message may join."""
        delivery = self._more.next()
        if delivery is None:
            return False
        self._end_of_callbacks()
        self.joined.append(delivery)
        self._contexts.append(copy_context())
        # If `_run` raises an exception, RUN_ALONE stays the result of this message.
        self.results.append(RunAlone.RUN_ALONE)
        self.results[-1] = result = self._run(delivery, handle)
        return isinstance(result, Disposition)

    def _may_go_on(self) -> bool:
        if reason := self._traces.why_never():
            self._more.end_sharing(reason)
            return False
        # A closed connection is marked for rollback.
        return not self._connection.needs_rollback and self._inbox.is_whole() and self._traces.is_clean

    def _run(self, delivery: Delivery, handle: Callable[[Delivery], Exception | None]) -> Result:
        number = len(self.joined) + 1
        name = f"outbox_{number}"
        try:
            is_new = self._inbox.join(number, delivery)
        except DjangoDatabaseError as error:
            logger.info("message %s runs alone: %s", delivery.message_id, shown_text(error))
            self._undo(number, name)
            return RunAlone.RUN_ALONE
        if not is_new:
            self._skipped.add(id(delivery))
            return Disposition.SKIPPED
        # Django drops the on_commit callbacks of savepoints that are rolled back.
        self._connection.savepoint_ids.append(name)
        try:
            with self._more.running(delivery):
                failure = handle(delivery)
                self._contexts[-1] = copy_context()
            sync_pipeline(self._connection)
        except Exception as error:
            self._error = error
            self._connection.savepoint_ids.pop()
            self._undo(number, name)
            return RunAlone.RUN_ALONE if self._is_doubtful(error) else error
        except BaseException:
            self._connection.savepoint_ids.pop()
            raise
        self._connection.savepoint_ids.pop()
        if self._traces.has_conflicts or self._connection.needs_rollback or self._is_aborted():
            self._undo(number, name)
            return RunAlone.RUN_ALONE
        if failure is not None:
            return failure
        self.handled.append(delivery)
        return Disposition.HANDLED

    def _is_aborted(self) -> bool:
        raw: Any = self._connection.connection
        return raw is None or raw.pgconn.transaction_status == pq.TransactionStatus.INERROR

    def _is_doubtful(self, error: BaseException) -> bool:
        """Whether earlier messages may have caused the error: the database or outbox stopped the handler."""
        # `issubclass`, because `isinstance` may ask a property of the error.
        return self._traces.has_conflicts or any(
            issubclass(type(one), (DjangoDatabaseError, DriverError, LeaseLost)) for one in causes(error, contexts=True)
        )

    def _undo(self, number: int, name: str) -> None:
        """Roll back to a savepoint. If the savepoint does not exist any more, raises an error: the transaction
        fails."""
        self._inbox.roll_back_to(number)
        self._connection.needs_rollback = False
        set_rollback_cause(self._connection, None)
        self._connection.run_on_commit = [entry for entry in self._connection.run_on_commit if name not in entry[0]]

    def _end_of_callbacks(self) -> None:
        taken = sum(map(len, self._callbacks))
        self._callbacks.append(self._connection.run_on_commit[taken:])

    def take_callbacks(self) -> None:
        """Take the on_commit callbacks out of Django's list, because Django would stop at the first error."""
        if self.joined:
            self._end_of_callbacks()
            self._connection.run_on_commit = []

    def run_callbacks(self) -> None:
        """Run the on_commit callbacks of each message, after COMMIT."""
        self._run_callbacks_of(range(len(self._callbacks)))

    def _run_callbacks_of(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            callbacks = self._callbacks[number]
            if not callbacks:
                continue
            self._more.finishing(number)
            if number:
                self._contexts[number - 1].run(self._run_callbacks, callbacks)
            else:
                # The context of the first message surrounds the whole transaction.
                self._run_callbacks(callbacks)

    def _run_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Run the callbacks of one message. An error ends the callbacks of this message only."""
        try:
            for _, function, is_robust in callbacks:
                try:
                    function()
                except Exception as error:
                    if not is_robust:
                        raise
                    logger.error("an on_commit callback of %s failed", self._name, exc_info=printable(error))
        except BaseException as error:
            # Also SystemExit and CancelledError: otherwise another message would be charged for them, and the callbacks
            # of the messages after this one would not run.
            logger.error(
                "%s has committed, so the handler is not called again after this error",
                self._name,
                exc_info=printable(error),
            )

    def results_after_failure(
        self, first: Sequence[Delivery], error: BaseException, error_after_commit: Callable[[BaseException], Exception]
    ) -> list[Result]:
        """Return the results of all messages, after the transaction has failed with `error`.

        A message is handled if its inbox row is committed nevertheless: COMMIT has succeeded although it raised an
        error, or a handler ran COMMIT by hand. Each other message runs alone. If a handler ran COMMIT by hand and then
        failed, its result is the error that `error_after_commit` makes.
        """
        stayed = self._inbox.still_there([*first, *self.joined])
        if stayed:
            logger.error(
                "%s: %d of %d messages that shared a transaction are committed, although the transaction failed: %s",
                self._name,
                len(stayed),
                len(first) + len(self.joined),
                shown_text(error),
            )
        done = {id(delivery) for delivery in (*first, *self.handled)}
        results: list[Result] = []
        for delivery in (*first, *self.joined):
            if delivery.message_id not in stayed:
                results.append(RunAlone.RUN_ALONE)
            elif id(delivery) in self._skipped:
                results.append(Disposition.SKIPPED)
            elif id(delivery) in done:
                results.append(Disposition.HANDLED)
            else:
                results.append(error_after_commit(error if self._error is None else self._error))
        if not first:
            # The inbox had the first message before.
            results.insert(0, Disposition.SKIPPED)
        known = results[: len(self._callbacks)]
        self._run_callbacks_of(number for number, result in enumerate(known) if result is Disposition.HANDLED)
        return results
