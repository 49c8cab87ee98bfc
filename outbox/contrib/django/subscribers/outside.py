"""Calls handlers with effects="outside": claim the message, run the handler without a transaction, finish.

```
 take: claim row          handler, no transaction                    finish: one transaction
 (short transaction) ───► step ─ step ─ …  (a row per step) ───────► inbox row, the handler's writes, claim row deleted
```

The inbox row is written only by `finish`, because other readers take an inbox row as handled. If the process dies
earlier, the claim ends with its term, and the next attempt finds the results of the finished steps.

See decision 203.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar
from uuid import UUID, uuid5

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox import names
from outbox.codec import JsonCodec
from outbox.contrib.django.database import effects
from outbox.contrib.django.database.transactions import begun_by_hand, in_test_case, in_transaction, watch_of
from outbox.contrib.django.subscribers import claims
from outbox.contrib.django.subscribers.claims import Claim
from outbox.contrib.django.subscribers.inbox import (
    InboxEntries,
    InboxInvoker,
    begin_call,
    commit_in_doubt,
    end_session,
    error_after_commit,
    handler_alias,
    look_for_later,
    one_writer,
    refresh_connections,
)
from outbox.contrib.django.subscribers.registry import Subscriber, find_subscriber
from outbox.errors import (
    ConfigurationError,
    HandlerNotStarted,
    LeaseLost,
    PermanentError,
    StepOutcomeUnknown,
    TransactionUsageError,
    UsageError,
)
from outbox.message import Body_co, Delivery
from outbox.ports import AnyHandler, ClaimedElsewhere, Disposition
from outbox.subscription import Effects, Subscription
from outbox.utils import fence
from outbox.utils.faults import point
from outbox.utils.safe_text import error_line, printable, shown_text

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# The term of a claim, in leases. The claim is renewed three times in a term, so once per lease.
TERM_LEASES: Final = 3

# A process that is told to stop waits at most this time (seconds) for handlers of claimed messages, and at most two
# leases. A supervisor kills a process that drains for 20 seconds.
_CLAIMS_SECONDS: Final = 15.0

_LONGEST_NAME: Final = 127
_FINISH: Final = "finish()"
_codec: Final = JsonCodec()
# Whether the function of a step is running.
_in_step: ContextVar[bool] = ContextVar("outbox_in_step", default=False)


class _Progress(enum.Enum):
    """How far an attempt is."""

    OPEN = "open"
    """The handler may begin steps and `finish`."""
    FINISHING = "finishing"
    """The handler is inside `finish`."""
    DONE = "done"
    """The message is marked as done."""
    FAILED = "failed"
    """The attempt has ended, and stores nothing any more. A thread of the handler may still run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimedDelivery(Delivery[Body_co]):
    """The delivery that a handler with effects="outside" gets.

    The handler has no open transaction. It calls other systems in `step`, and writes in `finish`.
    """

    attempt_in_progress: _Attempt

    def step(self, name: str, function: Callable[..., Result], *args: Any, once: bool = False) -> Any:
        """Return `function(*args)`, computed once per message: later attempts get the stored result.

        The result is stored as JSON, and returned as JSON decodes it. If the process dies between the call and the
        store, the next attempt calls the function again. Pass `step_key(name)` to the other system, so that it
        recognises the repetition. If the function raises an error, the error is passed on, no result is stored, and the
        next attempt calls the function again. With `once`, no attempt calls it again, also after an error: the next
        one raises StepOutcomeUnknown.
        """
        return self.attempt_in_progress.step(name, function, args, once)

    def step_key(self, name: str) -> str:
        """The idempotency key of a step: the same on every attempt, after a replay, and with every engine."""
        return str(uuid5(UUID(self.idempotency_key), name))

    @contextmanager
    def finish(self) -> Iterator[None]:
        """The final transaction: the writes and messages of the block and the mark "done" commit together, or not.

        If the handler returns without `finish`, outbox marks the message as done. Raises LeaseLost if another attempt
        has taken the message over; then nothing of the block is committed.
        """
        with self.attempt_in_progress.finish(self):
            yield


class _Attempt:
    """One attempt at a claimed message."""

    def __init__(self, registered: Subscriber, claim: Claim, lease_seconds: float) -> None:
        self._name = registered.name
        self._subscription = registered.subscription
        self._claim = claim
        self._lease_seconds = lease_seconds
        # The error of the last `finish`, also if the handler caught it.
        self._error: BaseException | None = None
        self.progress = _Progress.OPEN
        self.refusals = effects.RefusedWrites(registered.name)

    @property
    def _connection(self) -> BaseDatabaseWrapper:
        return connections[self._claim.alias]

    def step(self, name: str, function: Callable[..., Any], args: Sequence[Any], once: bool) -> Any:
        """See ClaimedDelivery.step."""
        self._require_open(f"step {name!r}")
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
            raise UsageError(
                f"{self._name}: the name of a step must have 1 to {_LONGEST_NAME} characters, not {name!r}."
            )
        known = self._quick(lambda: claims.find_step(self._connection, self._claim, name))
        if known is not None and known.result is not None:
            return _codec.decode(known.result)
        if known is not None and once:
            raise StepOutcomeUnknown(
                f"{self._name}: an earlier attempt began step {name!r} of message {self._claim.message_id}, and stored "
                "no result, because its function raised an error or its process died. Because of once=True, the step "
                "is not repeated. Catch StepOutcomeUnknown, find out from the other system what the step has done, and "
                "continue, or raise PermanentError."
            )
        point("claim.before_step")
        fence.check(commits=False)
        if once:
            self._store(name, None)
        # While the other system works, another thread may use the connection of a pool.
        refresh_connections(in_handler=True)
        token = _in_step.set(True)
        try:
            with effects.allowed():
                value = function(*args)
        finally:
            _in_step.reset(token)
        point("claim.in_step")
        encoded = self._encoded(name, value)
        self._store(name, encoded)
        point("claim.after_step")
        return _codec.decode(encoded)

    def _encoded(self, name: str, value: Any) -> bytes:
        try:
            encoded = _codec.encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise self._cannot_store(name, f"it cannot be written as JSON: {shown_text(error)}") from error
        if len(encoded) > names.MAX_BODY_BYTES:
            raise self._cannot_store(name, f"it has {len(encoded):,} bytes, the limit is {names.MAX_BODY_BYTES:,}")
        return encoded

    def _cannot_store(self, name: str, reason: str) -> PermanentError:
        return PermanentError(
            f"{self._name}: step {name!r} of message {self._claim.message_id} has run, but its result cannot be "
            f"stored, because {reason}. Another attempt would run the step again, so the message is a dead letter now. "
            "Let the step return a small value, for example an id, then replay the dead letter."
        )

    def _store(self, name: str, result: bytes | None) -> None:
        if not self._quick(lambda: claims.store_step(self._connection, self._claim, name, result)):
            raise self._taken_over()

    def _quick(self, run: Callable[[], Result]) -> Result:
        """Run a short transaction of this class, on SQLite while no other handler writes."""
        claims.replace_broken(self._connection)
        with effects.allowed(), one_writer(self._connection):
            return run()

    def _require_open(self, what: str) -> None:
        reason = ""
        if self.progress is _Progress.FINISHING:
            reason = "it is inside `with delivery.finish():`, whose transaction must be short. Move it before `finish`"
        elif self.progress is _Progress.DONE:
            reason = "the message is finished already. Move it before `finish`"
        elif what == _FINISH and _in_step.get():
            reason = "it is inside a step, whose result is not stored yet. Move it behind the step"
        elif self.progress is _Progress.FAILED:
            reason = "the attempt has failed already. Let the handler wait for its threads"
        elif found := [one.alias for one in connections.all(initialized_only=True) if _is_open(one)]:
            reason = (
                f"a transaction is open on {', '.join(map(repr, found))}. It would stay open during a slow call, and "
                "its rows would not be committed yet. Leave the atomic() block first, and do not execute BEGIN by hand"
            )
        if reason:
            raise TransactionUsageError(f"{self._name}: {what} was not done, because {reason}.")

    def _taken_over(self) -> LeaseLost:
        return LeaseLost(
            f"{self._name}: the claim of message {self._claim.message_id} is over, because it was not renewed in time "
            "and another attempt has taken the message over. Nothing of this attempt is stored any more; the other "
            "attempt continues after the last stored step."
        )

    @contextmanager
    def finish(self, delivery: Delivery) -> Iterator[None]:
        """See ClaimedDelivery.finish."""
        try:
            self._require_open(_FINISH)
        except TransactionUsageError as error:
            if self.progress is _Progress.OPEN:
                self._error = error
            raise
        self.refusals.check()
        connection, claim = self._connection, self._claim
        inbox = InboxEntries(connection, claim.group, claim.generation)
        self.progress = _Progress.FINISHING
        try:
            point("claim.before_finish")
            claims.replace_broken(connection)
            with one_writer(connection), effects.allowed(), transaction.atomic(using=claim.alias):
                timeout_seconds = self._subscription.timeout_seconds
                is_new = inbox.enter([delivery], lease_seconds=self._lease_seconds, timeout_seconds=timeout_seconds)
                if not is_new or not claims.lock(connection, claim):
                    raise self._taken_over()
                watch_of(connection).bind(self._name)
                yield
                point("claim.in_finish")
                fence.check()
                # The claim goes, and the inbox row is read again, in the last statements before COMMIT.
                if not claims.end(connection, claim):
                    raise self._taken_over()
                point("claim.before_commit")
                inbox.confirm([delivery], self._name)
        except BaseException as error:
            self._error = error
            with one_writer(connection), effects.allowed():
                self._conclude_failed_finish(inbox, delivery, error)
            raise
        self._error = None
        self.progress = _Progress.DONE
        point("claim.after_commit")

    def _conclude_failed_finish(self, inbox: InboxEntries, delivery: Delivery, error: BaseException) -> None:
        """After an error in `finish`, find out whether its transaction has committed all the same.

        Either COMMIT succeeded, and then its answer was lost or an on_commit callback failed, or the handler executed
        COMMIT by hand. After a COMMIT by hand, raise PermanentError, because the inbox skips the message from now on.
        """
        claim, is_in_doubt = self._claim, inbox.is_in_doubt
        if isinstance(error, LeaseLost) or not inbox.still_there([delivery]):
            self.progress = _Progress.OPEN
            if is_in_doubt:
                self.progress, self._error = _Progress.FAILED, commit_in_doubt(self._name, error)
                raise self._error from error
            fence.rolled_back()
        elif inbox.commit_is_next:
            self.progress = _Progress.DONE
        elif claims.is_held(self._connection, claim):
            # If another attempt had finished the message, it would have deleted the claim.
            self.progress = _Progress.FAILED
            self._error = error_after_commit(self._name, error)
            claims.delete(self._connection, claim)
            raise self._error
        else:
            self.progress = _Progress.OPEN

    def complete(self, delivery: Delivery) -> None:
        """Mark the message as done after the handler has returned, if the handler has not called `finish`.

        If the handler caught the error of a refused write or of its `finish`, raise this error: the message must not be
        done without its writes.
        """
        if self.progress is _Progress.FINISHING:
            raise TransactionUsageError(
                f"{self._name} has returned while `delivery.finish()` of message {self._claim.message_id} was still "
                "open, in another thread or without `with`. Wait for the thread, and call it with `with`."
            )
        if self.progress is _Progress.DONE:
            return
        self.refusals.check()
        if self._error is not None:
            raise self._error
        with self.finish(delivery):
            pass


def _is_open(connection: BaseDatabaseWrapper) -> bool:
    return in_transaction(connection) or begun_by_hand(connection)


class HandlerInvoker(InboxInvoker):
    """Calls all handlers of a project: those with effects="outside" by a claim, all others by InboxInvoker."""

    def __call__(
        self, subscription: Subscription, handler: AnyHandler, deliveries: Sequence[Delivery], *, generation: int
    ) -> Sequence[Disposition | Exception]:
        if subscription.effects is Effects.INSIDE:
            return super().__call__(subscription, handler, deliveries, generation=generation)
        # An engine without claims keeps the message in its queue until the handler returns.
        results = [
            self.claim(subscription, handler, delivery, lambda _: None, generation=generation)
            for delivery in deliveries
        ]
        return [_waiting(result) if isinstance(result, ClaimedElsewhere) else result for result in results]

    def claim(
        self,
        subscription: Subscription,
        handler: AnyHandler,
        delivery: Delivery,
        claimed: Callable[[float], None],
        *,
        generation: int,
    ) -> Disposition | Exception | ClaimedElsewhere:
        """Claim the message and call the handler (ports.ClaimingInvoker)."""
        result: Disposition | Exception | ClaimedElsewhere
        begin_call()
        try:
            result = self._claimed(subscription, handler, delivery, claimed, generation)
        except Exception as error:
            result = error
        finally:
            refresh_connections()
        self._conclude(subscription, handler, [delivery], [result])
        return result

    def _claimed(
        self,
        subscription: Subscription,
        handler: AnyHandler,
        delivery: Delivery,
        claimed: Callable[[float], None],
        generation: int,
    ) -> Disposition | Exception | ClaimedElsewhere:
        registered = find_subscriber(subscription)
        if registered is None:
            raise ConfigurationError(
                f"group {subscription.group!r} has no subscriber for {subscription.topic!r} in this process, so its "
                "handler with effects='outside' has no database for its claims: register it with @subscriber."
            )
        connection = connections[handler_alias(registered)]
        claim = Claim(
            alias=connection.alias,
            group=subscription.group,
            generation=generation,
            message_id=delivery.message_id,
            attempt=delivery.attempt,
            term_seconds=TERM_LEASES * self._lease_seconds,
        )
        if claims.runs_here(claim):
            return ClaimedElsewhere(claim.term_seconds / 3)
        try:
            point("claim.before_take")
            with one_writer(connection):
                if self._has_generations:
                    look_for_later(connection, claim.group, claim.generation)
                taken = claims.take(connection, claim)
        except Exception as error:
            end_session(connection)
            return HandlerNotStarted(
                f"{registered.name} was not called, because message {delivery.message_id} could not be claimed on "
                f"{connection.alias!r}: {error_line(error)}. The call does not count as an "
                f"attempt. The message waits until {connection.alias!r} answers."
            )
        if not isinstance(taken, int):
            return taken
        point("claim.after_take")
        claim = replace(claim, token=taken)
        try:
            claimed(claim.term_seconds)
        except Exception as error:
            with one_writer(connection):
                claims.delete(connection, claim)
            return error
        return self._attempt(registered, handler, delivery, claim)

    def _attempt(
        self, registered: Subscriber, handler: AnyHandler, delivery: Delivery, claim: Claim
    ) -> Disposition | Exception:
        attempt = _Attempt(registered, claim, self._lease_seconds)
        given = ClaimedDelivery(**delivery.fields(), attempt_in_progress=attempt)
        try:
            with self._renewed(registered, claim):
                with effects.refused(attempt.refusals):
                    handler(given)  # type: ignore[arg-type]
                attempt.complete(given)
        except BaseException as error:
            if attempt.progress is _Progress.DONE:
                logger.error(
                    "%s has finished message %s, so the handler is not called again after this error",
                    registered.name,
                    delivery.message_id,
                    exc_info=printable(error),
                )
                return Disposition.HANDLED
            attempt.progress = _Progress.FAILED
            connection = connections[claim.alias]
            with one_writer(connection):
                claims.release(connection, claim)
            if isinstance(error, Exception):
                return error
            raise
        return Disposition.HANDLED

    def _renewed(self, registered: Subscriber, claim: Claim) -> AbstractContextManager[None]:
        if in_test_case(connections[claim.alias]):
            # The claim is not committed, so another connection cannot renew it.
            return nullcontext()
        return claims.renewed(claim, for_seconds=registered.subscription.timeout_seconds)


def claims_seconds(lease_seconds: float) -> float:
    """Return how long (seconds) a process that is told to stop waits for handlers of claimed messages."""
    return min(_CLAIMS_SECONDS, 2 * lease_seconds)


def _waiting(result: ClaimedElsewhere) -> HandlerNotStarted:
    return HandlerNotStarted(
        f"another attempt has claimed the message, and its claim lasts {result.seconds:.1f} s, if it is not renewed. "
        "The call does not count as an attempt. The message waits until the claim ends."
    )
