"""`@transactional_message`: a function's local transaction and its message commit together or not at all."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar, cast, overload
from uuid import UUID

from asgiref.sync import async_to_sync, sync_to_async
from django.db import InternalError, connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg import Error as DriverError

from outbox import names
from outbox.arguments import wait_of, with_timeout
from outbox.broker.database.executor import Executor
from outbox.broker.transaction.decisions import standing_decisions
from outbox.contrib.django.database import effects
from outbox.contrib.django.database.database_errors import naming
from outbox.contrib.django.database.transactions import in_pipeline, lost, statement_text, sync_pipeline, watch_of
from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.ledger import ledger
from outbox.contrib.django.publishing.publish import (
    Published,
    build,
    check_immunity,
    check_option,
    end_soon,
    messages_of,
    publish_bound,
    require_whole,
)
from outbox.contrib.django.settings.conf import get_settings
from outbox.contrib.django.subscribers.callables import (
    is_asynchronous,
    is_generator,
    name_of,
    refuse_work_to_come,
    signature_of,
)
from outbox.declared_types import NOT_GIVEN, topic_of
from outbox.errors import ConfigurationError, TransactionUsageError, UsageError
from outbox.hooks import Option
from outbox.message import Message
from outbox.transaction import Decision, HalfTransaction
from outbox.utils import log_context
from outbox.utils.faults import point
from outbox.utils.ids import uuid7
from outbox.utils.safe_text import shown_text

logger = logging.getLogger(__name__)

# -- the parts of a message ------------------------------------------------------------------------
#
# The parts of a message under `@transactional_message`: each part is a value, or a function of the decorated function's
# arguments.


# The name of the parameter by which a part's function receives the return value of the decorated function.
RESULT: Final = "result"

# Parameters such as `*args` and `**kwargs`. A caller cannot pass a value by the name of such a parameter.
_COLLECTING: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class MessagePart:
    """One field of the message, such as the body: a value, or a function and the names of its arguments.

    `wanted` has the arguments without a default, and `optional` the arguments with a default. If the decorated function
    has a parameter like `**kwargs`, `others` is the name of this parameter, because `**kwargs` may contain an argument
    that the part's function needs. Otherwise `others` is ''.
    """

    what: str
    value: Any
    wanted: tuple[str, ...] | None = None
    optional: tuple[str, ...] = ()
    others: str = ""

    @property
    def needs_result(self) -> bool:
        """Return whether the part can be built only after the decorated function has run."""
        return self.wanted is not None and RESULT in (*self.wanted, *self.optional)

    def of(self, arguments: Mapping[str, Any], name: str) -> Any:
        """Return the part's value for one call of the function `name`. Raises the errors of the part's function.

        Raises UsageError if the call did not pass an argument that the part needs.
        """
        if self.wanted is None:
            return self.value
        known = {**arguments.get(self.others, {}), **arguments}
        if lacking := [wanted for wanted in self.wanted if wanted not in known]:
            raise UsageError(
                f"{self.what}= of {name} needs {', '.join(map(repr, lacking))}, which this call did not pass. "
                "Nothing was published, and the transaction is rolled back. Pass the argument, or give the parameter a "
                "default in the function of this part."
            )
        names = (*self.wanted, *self.optional)
        return self.value(**{wanted: known[wanted] for wanted in names if wanted in known})


def part(function: Callable[..., Any], what: str, value: Any, *, may_yield: bool = False) -> MessagePart:
    """Return the message part named `what`, for the messages of `function`.

    Raises ConfigurationError for a wrong value. If `may_yield` is true, the part may be a generator, which runs to its
    end when the messages are built.
    """
    if not callable(value):
        return MessagePart(what, value)
    name = name_of(function)
    if is_asynchronous(value) or (is_generator(value) and not may_yield):
        raise ConfigurationError(
            f"{what}= of {name} is an asynchronous function or a generator, which cannot be called when the message is "
            f"built. Pass a plain function with parameters of {name}."
        )
    parameters = signature_of(function).parameters
    others = next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), "")
    wanted: list[str] = []
    optional: list[str] = []
    for parameter in _parameters(name, what, value):
        can_be_given = parameter.kind is not parameter.POSITIONAL_ONLY and (
            bool(others) or parameter.name in (*parameters, RESULT)
        )
        if parameter.kind in _COLLECTING or (parameter.default is parameter.empty and not can_be_given):
            raise _unknown(name, what, parameter, parameters)
        if can_be_given:
            (wanted if parameter.default is parameter.empty else optional).append(parameter.name)
    return MessagePart(what, value, tuple(wanted), tuple(optional), others)


def _parameters(name: str, what: str, value: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(signature_of(value).parameters.values())
    except ValueError:
        raise ConfigurationError(
            f"{what}= of {name} is {value!r}, which has no readable signature: pass a function with parameters of "
            f"{name}, like `lambda order: {{'id': order.pk}}`, or pass a value."
        ) from None


def _unknown(name: str, what: str, parameter: inspect.Parameter, known: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(
        f"{what}= of {name} is a function with the parameter {str(parameter)!r}. Rename this parameter: it must have "
        f"the name of a parameter of {name} ({', '.join(known) or 'none'}), or 'result' for the return value of "
        f"{name}."
    )


# -- writes to another database --------------------------------------------------------------------
#
# The code below refuses a write to a database whose transaction does not decide about the message.
#
# Without `using`, `@transactional_message` chooses an alias, but a router may send a model's write to another alias. If
# the function failed after this write, the row would stay, and the message would be rolled back. So such a write is
# refused.


# The execute wrapper of the decorated function that runs, if its writes are watched.
_watching: ContextVar[Callable[..., Any] | None] = ContextVar("outbox_watching", default=None)


@contextmanager
def writes_stay_on(alias: str | None, name: str) -> Iterator[None]:
    """Inside the block, refuse this thread's writes on every other alias than `alias`.

    A statement counts as a write unless it is known that it changes no rows (effects.written).
    If `alias` is None, the block allows all writes, also inside a block that refuses writes. Raises
    TransactionUsageError before the refused write is executed. If the code in the block swallows this error, the error
    is raised again at the end of the block. The check detects only writes through Django's cursors. In a project with
    one database, this check costs nothing.
    """
    refused: list[TransactionUsageError] = []

    def watch(execute: Callable[..., Any], statement: Any, params: Any, many: bool, context: Any) -> Any:
        connection = context["connection"]
        if _watching.get() is watch and effects.written(text := statement_text(statement, connection)):
            other = connection.alias
            refused.append(
                TransactionUsageError(
                    f"{name} wrote to {other!r} ({' '.join(text.split())[:60]}…), but its message belongs to the "
                    f"transaction on {alias!r}. If the function failed after this write, the row would stay and the "
                    "message would be rolled back. The write was not executed, and the transaction is rolled back. "
                    f"Write @transactional_message(…, using={other!r}) to run the transaction on {other!r}. If this "
                    f"write may commit in a separate transaction, write using={alias!r} instead."
                )
            )
            raise refused[-1]
        return execute(statement, params, many, context)

    token = _watching.set(None if alias is None else watch)
    try:
        with ExitStack() as stack:
            for other in () if alias is None else connections:
                if other != alias:
                    stack.enter_context(connections[other].execute_wrapper(watch))
            yield
    finally:
        _watching.reset(token)
    if refused:
        raise refused[-1]


# -- the end of the block --------------------------------------------------------------------------
#
# The block is ours, so its last statement reads its own row again.


def confirm_before_commit(connection: BaseDatabaseWrapper, published: Published, name: str) -> None:
    """At the end of a block, verify that the block's first message still belongs to the block's transaction.

    If the message does not belong to the transaction any more, raise TransactionUsageError with `name`, the name of the
    decorated function. If the application marked the block for rollback, the function checks only whether the
    connection was closed.
    """
    if connection.closed_in_transaction:
        raise lost(connection, name, "the connection of the transaction was closed")
    if connection.needs_rollback:
        return
    with naming(f"the commit of {name}", connection):
        try:
            is_there = _is_there(connection, published)
        except (InternalError, DriverError) as error:
            raise lost(connection, name, str(error).strip()) from error
    if not is_there:
        raise lost(connection, name, "a ROLLBACK was executed in this transaction, so its messages are gone")


def _is_there(connection: BaseDatabaseWrapper, published: Published) -> bool:
    sync_pipeline(connection)
    if published.half is not None:
        return _is_half_there(connection, published.half)
    if published.are_there is not None:
        with connection.wrap_database_errors:
            return published.are_there()
    return _is_decision_there(connection, published.receipts[0].transaction_id)


def _is_half_there(connection: BaseDatabaseWrapper, half: HalfTransaction) -> bool:
    halves = watch_of(connection).halves
    found = ledger.committed(connection, halves.ids)
    if len(connection.atomic_blocks) == 1 and not in_pipeline(connection):
        # Only COMMIT follows, so `_after_commit` can use the ids in `found`, and does not need to read the ledger
        # again.
        halves.in_ledger = found
    return half.transaction_id in found


def _is_decision_there(connection: BaseDatabaseWrapper, transaction_id: UUID) -> bool:
    with connection.wrap_database_errors:
        return bool(standing_decisions(Executor(connection.connection, get_settings().schema), [transaction_id]))


def mark_transaction(connection: BaseDatabaseWrapper, name: str) -> str:
    """Return a mark that identifies the open transaction; '' on databases other than PostgreSQL.

    If a block publishes its messages at its end, `require_marked` compares this mark with the transaction that is open
    then.
    """
    if connection.vendor != "postgresql":
        return ""
    # In a pipeline, psycopg sends BEGIN together with the statement that reads the transaction id, which saves a round
    # trip.
    with naming(f"the transaction of {name}", connection), connection.connection.pipeline():
        return ledger.current_xid(connection)


def require_marked(connection: BaseDatabaseWrapper, mark: str, name: str) -> None:
    """Raise TransactionUsageError if the open transaction is not the transaction that `mark` identifies.

    Call this function before publishing.
    """
    require_whole(connection, lambda: f"publishing for {name}")
    with naming(f"publishing for {name}", connection):
        is_same = not mark or ledger.current_xid(connection) == mark
    if not is_same:
        raise lost(
            connection, name, "a COMMIT or ROLLBACK was executed inside the block, and another transaction has begun"
        )


def report_rollback(connection: BaseDatabaseWrapper, half: HalfTransaction, xid: str) -> None:
    """Report ROLLBACK if the rollback is certain, else ask for a check.

    Call this function after a block of this package has ended without a commit.
    """
    if _is_rolled_back(connection, half, xid):
        end_soon(get_broker(), half, Decision.ROLLBACK)
    else:
        get_broker().hint_one_way(half.transaction_id)


def _is_rolled_back(connection: BaseDatabaseWrapper, half: HalfTransaction, xid: str) -> bool:
    raw = connection.connection
    if raw is None or getattr(raw, "closed", False) or connection.needs_rollback:
        # Do not open a new connection for this look-up. If the outer block needs a rollback, Django allows no statement
        # before that block ends.
        return False
    try:
        sync_pipeline(connection)
        return ledger.is_rolled_back(connection, half.transaction_id, xid)
    except Exception as error:
        logger.info(
            "the outcome of transaction %s on %r could not be read, so check-back will read it: %s",
            half.transaction_id,
            connection.alias,
            shown_text(error),
            extra=log_context.about_half(half),
        )
        return False


# -- the decorator ---------------------------------------------------------------------------------


Function = TypeVar("Function", bound=Callable[..., Any])

# The name of the part that returns complete messages. This part replaces the topic and the other parts.
MESSAGES: Final = "messages"
# The names of the parts that are options (`outbox.hooks.Option`) begin with this text.
_OPTION: Final = "option "


@overload
def transactional_message(
    topic: str | type,
    *options: Option | Callable[..., Option],
    body: Any,
    key: object | Callable[..., object] = ...,
    tag: str | Callable[..., str] = ...,
    headers: Mapping[str, str] | Callable[..., Mapping[str, str]] | None = ...,
    delay: float | timedelta | None = ...,
    deliver_at: datetime | Callable[..., datetime] | None = ...,
    timeout: float | timedelta | None = ...,
    immunity_seconds: int | None = ...,
    using: str | None = ...,
    durable: bool = ...,
) -> Callable[[Function], Function]: ...


@overload
def transactional_message(
    *,
    messages: Callable[..., Iterable[Message]],
    immunity_seconds: int | None = ...,
    using: str | None = ...,
    durable: bool = ...,
) -> Callable[[Function], Function]: ...


def transactional_message(
    topic: str | type = "",
    *options: Option | Callable[..., Option],
    body: Any = NOT_GIVEN,
    messages: Callable[..., Iterable[Message]] | None = None,
    key: object | Callable[..., object] = "",
    tag: str | Callable[..., str] = "",
    headers: Mapping[str, str] | Callable[..., Mapping[str, str]] | None = None,
    delay: float | timedelta | None = None,
    deliver_at: datetime | Callable[..., datetime] | None = None,
    timeout: float | timedelta | None = None,
    immunity_seconds: int | None = None,
    using: str | None = None,
    durable: bool = False,
) -> Callable[[Function], Function]:
    """Run the decorated function in `atomic()`; its message is delivered if and only if the transaction commits.

    `body`, `key`, `tag`, `headers` and `deliver_at` are values, or functions whose parameters are named like parameters
    of the decorated function. If a function for `body`, `key`, … has a parameter `result`, this parameter
    gets the return value of the decorated function, for example an object with a database id. A message that needs
    `result` is built after the decorated function has run, and before COMMIT. If the decorated function has `**kwargs`,
    a function for `body`, `key`, … may also have parameters that are named like keyword arguments of the caller.

    With a declared type instead of a topic, `body` is a value of this type, or a function that returns one.

    `options` are the options of `publish`, or functions like those for `body` that return one each. If an option finds
    that the message is a duplicate, the function runs, but publishes no message.

    `delay` and `timeout` are values, as for `publish`.

    `messages` replaces `topic`, `options`, `body`, `key`, `tag`, `headers`, `deliver_at` and `timeout`. The value of
    `messages` is a function whose parameters follow the same rules as the parameters of `body`. The function returns or
    yields any number of messages, of any topics, made by `message(…)`. The messages become visible together or never.

    `immunity_seconds` is how long the broker waits before the first check (default OUTBOX['IMMUNITY_SECONDS']). Choose
    a larger number for a function that runs for a long time.
    `using` is the alias of the transaction. Without `using`, the database routers choose the alias, and a write to
    another alias is refused. With `durable`, a call inside another transaction is refused.

    Inside another `atomic()` block (also the block of ATOMIC_REQUESTS), the message is delivered only if the outermost
    block commits. For an async function, the transaction is on one synchronous thread. If the function raises an
    exception, the transaction rolls back. When the function is decorated, the decorator raises ConfigurationError if
    the declaration is invalid.
    """
    parts = {
        "body": body,
        "key": key,
        "tag": tag,
        "headers": headers,
        "deliver_at": deliver_at,
    }
    for number, option in enumerate(options, 1):
        if not callable(option):
            check_option(option, "@transactional_message")
        parts[f"{_OPTION}{number}"] = option
    kind = None if isinstance(topic, str) else topic
    topic = topic_of(topic, "@transactional_message")
    if messages is None:
        _check_one(topic, body)
        wait_of(topic, delay, cast(Any, deliver_at))
        if timeout is not None:
            with_timeout(topic, None, timeout)
    else:
        _check_several(messages, topic=topic, delay=delay, timeout=timeout, **parts)
        parts = {MESSAGES: messages}
    check_immunity(topic, immunity_seconds)

    def decorate(function: Function) -> Function:
        _refuse_unsuitable(function)
        call = _Call(
            name=name_of(function),
            signature=signature_of(function),
            parts={what: part(function, what, value, may_yield=what == MESSAGES) for what, value in parts.items()},
            topic=topic,
            kind=kind,
            delay=delay,
            timeout=timeout,
            immunity_seconds=immunity_seconds,
            using=using,
            durable=durable,
        )
        return cast(Function, _wrap(function, call))

    return decorate


def _check_one(topic: str, body: Any) -> None:
    if body is NOT_GIVEN or not topic:
        raise ConfigurationError(
            "@transactional_message needs a topic and body=, or messages=. The value of messages= is a function that "
            "returns or yields any number of messages made by message(…)."
        )
    names.check_topic(topic)


def _check_several(messages: Any, **others: Any) -> None:
    absent = {"body": (NOT_GIVEN,)}
    if given := [what for what, value in others.items() if value not in absent.get(what, ("", None))]:
        raise ConfigurationError(
            f"@transactional_message(messages=…) cannot be used together with {', '.join(given)}: pass "
            f"{', '.join(given)} to each message(…) instead."
        )
    if not callable(messages):
        raise ConfigurationError(
            f"messages= of @transactional_message must be a function that returns or yields messages made by "
            f"message(…), not {messages!r:.80}: a message that is made only once would have the same id in every call."
        )


def _wrap(function: Callable[..., Any], call: _Call) -> Callable[..., Any]:
    if is_asynchronous(function):
        # The transaction is on one synchronous thread. The coroutine's ORM calls run on the same thread.
        synchronous = async_to_sync(cast(Callable[..., Awaitable[Any]], function))
        run = sync_to_async(functools.partial(call.run, synchronous), thread_sensitive=True)

        @functools.wraps(function)
        async def asynchronous_wrapper(*args: Any, **kwargs: Any) -> Any:
            return await run(args, kwargs)

        return asynchronous_wrapper

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call.run(function, args, kwargs)

    return wrapper


def _refuse_unsuitable(function: Any) -> None:
    if isinstance(function, (classmethod, staticmethod)):
        raise ConfigurationError(
            f"@transactional_message stands above @{type(function).__name__} of {function.__qualname__}: put "
            f"@transactional_message below @{type(function).__name__}, next to the def."
        )
    if inspect.isclass(function) or not callable(function):
        raise ConfigurationError(
            f"@transactional_message takes a function or method, not {function!r}; for a class-based view, decorate "
            f"its method (post, form_valid)."
        )
    name = name_of(function)
    if is_generator(function):
        raise ConfigurationError(
            f"{name} is a generator, so its body would run after the transaction has ended. Decorate a function that "
            "does its work before it returns."
        )
    try:
        parameters = signature_of(function).parameters
    except ValueError:
        raise ConfigurationError(
            f"{name} has no readable signature, so @transactional_message cannot find its parameters: write a def "
            f"that calls {name}, and decorate this def."
        ) from None
    if RESULT in parameters:
        raise ConfigurationError(
            f"{name} has a parameter called 'result', but @transactional_message uses this name for the return value "
            f"of {name}: rename the parameter."
        )


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A decorated function with the parts of its message, and the arguments of the decorator.

    `topic` is empty if the argument `messages` is used, because each message then has its own topic. `kind` is the
    declared type that the body must have, or None.
    """

    name: str
    signature: inspect.Signature
    parts: Mapping[str, MessagePart]
    topic: str
    kind: type | None
    delay: float | timedelta | None
    timeout: float | timedelta | None
    immunity_seconds: int | None
    using: str | None
    durable: bool

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Open the block, publish the messages, run the function and end the block. Report a certain rollback."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        alias = self.using or _default_alias()
        watched = None if self.using else alias
        block = _Block(connections[alias])
        commits = False
        try:
            with transaction.atomic(using=alias, durable=self.durable), writes_stay_on(watched, self.name):
                watch_of(block.connection).bind(self.name)
                result = self._inside(block, functools.partial(function, *args, **kwargs), bound.arguments)
                point("producer.before_local_commit")
                will_commit = not block.connection.needs_rollback
            commits = will_commit
        finally:
            if not commits:
                block.report_rollback()
        return result

    def _inside(self, block: _Block, function: Callable[[], Any], arguments: Mapping[str, Any]) -> Any:
        """Publish the messages and run the function; if a part needs the function's result, run the function first."""
        connection = block.connection
        is_late = any(part.needs_result for part in self.parts.values())
        if not is_late:
            block.published = self._publish(connection, arguments)
        mark = mark_transaction(connection, self.name) if block.published is None else ""
        result = function()
        refuse_work_to_come(result, self.name)
        if block.published is not None:
            confirm_before_commit(connection, block.published, self.name)
        elif not connection.needs_rollback:
            require_marked(connection, mark, self.name)
            if is_late:
                block.published = self._publish(connection, {**arguments, RESULT: result})
        return result

    def _publish(self, connection: BaseDatabaseWrapper, arguments: Mapping[str, Any]) -> Published | None:
        """Build and publish the messages. Returns None if there are no messages, or only duplicates."""
        built = self._build({what: part.of(arguments, self.name) for what, part in self.parts.items()})
        published = publish_bound(built, using=connection.alias, immunity_seconds=self.immunity_seconds)
        return published if published.is_stored else None

    def _build(self, values: dict[str, Any]) -> list[Message]:
        if MESSAGES in values:
            return messages_of(values[MESSAGES], f"messages= of {self.name}")
        topic: Any = self.topic
        body = values.pop("body")
        if self.kind is not None:
            if not isinstance(body, self.kind):
                raise UsageError(
                    f"body= of {self.name} is {body!r:.80}, but @transactional_message was given the type "
                    f"{self.kind.__qualname__}: return a value of this type. Nothing was published, and the "
                    "transaction is rolled back."
                )
            topic, body = body, NOT_GIVEN
        options = [values.pop(what) for what in self.parts if what.startswith(_OPTION)]
        return [build(topic, body, options, delay=self.delay, timeout=self.timeout, **values)]


@dataclass
class _Block:
    """The `atomic()` block of one call of a decorated function, and the messages published in the block."""

    connection: BaseDatabaseWrapper
    published: Published | None = None
    # Ids of this process only grow, even if its clock is set back.
    began: UUID = field(default_factory=uuid7)
    began_at: datetime = field(default_factory=functools.partial(datetime.now, UTC))

    def report_rollback(self) -> None:
        """Report the rollback to the broker, if the broker has a half message of the block."""
        if self.published is None or (half := self.published.half) is None:
            return
        first = half.messages[0]
        # A message made before the block may have a random id.
        if first.message_id > self.began and first.born_at > self.began_at:
            report_rollback(self.connection, half, self.published.xid)
        else:
            # The caller has this message, and may publish it again. The report has no answer, so it could arrive during
            # that call and decide its transaction. The barrier of check-back decides either one or the other.
            get_broker().hint_one_way(half.transaction_id)


def _default_alias() -> str:
    """Return the default alias, which the database routers choose for writes to the ledger."""
    from outbox.contrib.django.models import LedgerEntry

    return router.db_for_write(LedgerEntry)
