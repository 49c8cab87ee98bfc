"""`@transactional_message`: a function's local transaction and its message commit together or not at all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar, cast, overload

from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox import names
from outbox.contrib.django.database.blocks import watch_of
from outbox.contrib.django.ledger.check_functions import Lookup, register_lookup
from outbox.contrib.django.publishing.elsewhere import writes_stay_on
from outbox.contrib.django.publishing.ends import (
    Published,
    confirm_before_commit,
    mark_transaction,
    report_rollback,
    require_marked,
)
from outbox.contrib.django.publishing.messages import message, messages_of, wait_of
from outbox.contrib.django.publishing.parts import NOT_GIVEN, RESULT, MessagePart, arguments_of, part
from outbox.contrib.django.publishing.publish import publish_bound
from outbox.contrib.django.publishing.publish_refusals import check_immunity
from outbox.contrib.django.subscribers.callables import (
    has_a_name,
    is_asynchronous,
    is_generator,
    name_of,
    path_of,
    refuse_work_to_come,
    signature_of,
)
from outbox.errors import ConfigurationError
from outbox.message import Message
from outbox.utils.faults import point

Function = TypeVar("Function", bound=Callable[..., Any])

# The part that gives complete messages, instead of a topic and the parts of one.
MESSAGES: Final = "messages"


@overload
def transactional_message(
    topic: str,
    *,
    body: Any,
    key: object | Callable[..., object] = ...,
    tag: str | Callable[..., str] = ...,
    headers: Mapping[str, str] | Callable[..., Mapping[str, str]] | None = ...,
    delay: float | timedelta | None = ...,
    deliver_at: datetime | Callable[..., datetime] | None = ...,
    check: Lookup | None = ...,
    immunity_seconds: int | None = ...,
    using: str | None = ...,
    durable: bool = ...,
) -> Callable[[Function], Function]: ...


@overload
def transactional_message(
    *,
    messages: Callable[..., Iterable[Message]],
    check: Lookup | None = ...,
    immunity_seconds: int | None = ...,
    using: str | None = ...,
    durable: bool = ...,
) -> Callable[[Function], Function]: ...


def transactional_message(
    topic: str = "",
    *,
    body: Any = NOT_GIVEN,
    messages: Callable[..., Iterable[Message]] | None = None,
    key: object | Callable[..., object] = "",
    tag: str | Callable[..., str] = "",
    headers: Mapping[str, str] | Callable[..., Mapping[str, str]] | None = None,
    delay: float | timedelta | None = None,
    deliver_at: datetime | Callable[..., datetime] | None = None,
    check: Lookup | None = None,
    immunity_seconds: int | None = None,
    using: str | None = None,
    durable: bool = False,
) -> Callable[[Function], Function]:
    """Run the decorated function in `atomic()` together with a message that is delivered if and only if it commits.

    `body`, `key`, `tag`, `headers` and `deliver_at` are values, or functions whose parameters are named like parameters
    of the decorated function. A function with a parameter `result` gets the return value (with an id made by the
    database, for example). The message is then built after the function ran, before COMMIT. Keyword arguments that go
    into `**kwargs` are found under their names.

    `messages`, in place of a topic and parts, is such a function that returns or yields any number of messages, of any
    topics, made by `message(…)`; they become visible together or never.

    `check` is a look-up by message (the first of several), for example `lambda m: Order.objects.filter(pk=m.key,
    status="paid").exists()`. With the ledger it runs in addition, and a disagreement is reported. Without the ledger it
    decides. `immunity_seconds` is how long the broker waits before the first check (for a function that runs long;
    default OUTBOX['IMMUNITY_SECONDS']). `using` is the alias of the transaction. Without it, the database routers
    choose it, and a write to another alias is refused. `durable` refuses to be nested in another transaction.

    Nested in another `atomic()` (ATOMIC_REQUESTS too) the message follows the outermost commit. Async functions run
    with the transaction on their own synchronous thread. An exception that leaves the function rolls back. Raises
    ConfigurationError at decoration for an impossible declaration.
    """
    parts = {"body": body, "key": key, "tag": tag, "headers": headers, "deliver_at": deliver_at}
    if messages is None:
        _check_one(topic, body)
        wait_of(topic, delay, cast(Any, deliver_at))
    else:
        _check_several(messages, topic=topic, delay=delay, **parts)
        parts = {MESSAGES: messages}
    check_immunity(topic, immunity_seconds)
    return _Decorator(
        topic=topic,
        given=parts,
        delay=delay,
        immunity_seconds=immunity_seconds,
        check=check,
        using=using,
        durable=durable,
    )


def _check_one(topic: str, body: Any) -> None:
    if body is NOT_GIVEN or not topic:
        raise ConfigurationError(
            "@transactional_message needs a topic and body=, or messages= for several (or none): a function that "
            "returns or yields what message(…) builds."
        )
    names.check_topic(topic)


def _check_several(messages: Any, **others: Any) -> None:
    absent = {"body": (NOT_GIVEN,)}
    if given := [what for what, value in others.items() if value not in absent.get(what, ("", None))]:
        raise ConfigurationError(
            f"@transactional_message(messages=…) takes no {', '.join(given)} beside it: give that to each message(…)."
        )
    if not callable(messages):
        raise ConfigurationError(
            f"messages= of @transactional_message must be a function that returns or yields what message(…) builds, "
            f"not {messages!r:.80}: a message made here would have the same id in every call."
        )


@dataclass(frozen=True, kw_only=True)
class _Decorator:
    """The declared parts of the messages, to be applied to a function.

    `topic` is empty if `messages` gives the topics.
    """

    topic: str
    given: Mapping[str, Any]
    delay: float | timedelta | None
    immunity_seconds: int | None
    check: Lookup | None
    using: str | None
    durable: bool

    def __call__(self, function: Function) -> Function:
        _refuse_unsuitable(function)
        call = _Call(
            decorator=self,
            name=name_of(function),
            signature=signature_of(function),
            parts={what: part(function, what, value, may_yield=what == MESSAGES) for what, value in self.given.items()},
            checker=self._register_check(function),
        )
        return cast(Function, _wrap(function, call))

    def _register_check(self, function: Callable[..., Any]) -> str:
        """The name by which other processes find the look-up, or ''."""
        if self.check is None:
            return ""
        if not has_a_name(function):
            raise ConfigurationError(
                f"check= of {self._about} needs a function that every process finds by its name: put "
                "@transactional_message next to a def, not into method_decorator or around functools.partial."
            )
        checker = path_of(function)
        register_lookup(checker, self.check)
        return checker

    @property
    def _about(self) -> str:
        return f"topic {self.topic!r}" if self.topic else "several messages"

    def build(self, values: dict[str, Any], name: str) -> list[Message]:
        """The messages of one call of the function `name`, from the values of its parts."""
        if MESSAGES in values:
            return messages_of(values[MESSAGES], f"messages= of {name}")
        return [message(self.topic, values.pop("body"), delay=self.delay, **values)]


def _wrap(function: Callable[..., Any], call: _Call) -> Callable[..., Any]:
    if is_asynchronous(function):
        # The transaction is on one synchronous thread; the coroutine's ORM calls run on it too.
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
            f"put @transactional_message below @{type(function).__name__} of {function.__qualname__}, next to the def."
        )
    if inspect.isclass(function) or not callable(function):
        raise ConfigurationError(
            f"@transactional_message takes a function or method, not {function!r}; for a class-based view, decorate "
            f"its method (post, form_valid)."
        )
    name = name_of(function)
    if is_generator(function):
        raise ConfigurationError(
            f"{name} is a generator: its body would run after the transaction. Decorate a function that does its work "
            f"before it returns."
        )
    try:
        parameters = signature_of(function).parameters
    except ValueError:
        raise ConfigurationError(
            f"{name} has no readable signature, so the parts of a message cannot find its parameters: decorate a def "
            "that calls it."
        ) from None
    if RESULT in parameters:
        raise ConfigurationError(
            f"{name} has a parameter called 'result', which @transactional_message uses for its return value: rename "
            "it."
        )


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A decorated function with its message. `name` is for errors, `checker` for check-back."""

    decorator: _Decorator
    name: str
    signature: inspect.Signature
    parts: Mapping[str, MessagePart]
    checker: str

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Open the block, publish, run, leave the block; report a rollback if it is certain."""
        arguments = arguments_of(self.signature, args, kwargs)
        alias = self.decorator.using or _default_alias()
        watched = None if self.decorator.using else alias
        block = _Block(connections[alias])
        commits = False
        try:
            with transaction.atomic(using=alias, durable=self.decorator.durable), writes_stay_on(watched, self.name):
                watch_of(block.connection).bind(self.name)
                result = self._inside(block, functools.partial(function, *args, **kwargs), arguments)
                point("producer.before_local_commit")
                will_commit = not block.connection.needs_rollback
            commits = will_commit
        finally:
            if not commits:
                block.report_rollback()
        return result

    def _inside(self, block: _Block, function: Callable[[], Any], arguments: Mapping[str, Any]) -> Any:
        """Publish and run, in the order that the parts need."""
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
        """Publish the built messages; None if there are none."""
        built = self.decorator.build(
            {what: part.of(arguments, self.name) for what, part in self.parts.items()}, self.name
        )
        if not built:
            return None
        return publish_bound(
            built,
            using=connection.alias,
            checker=self.checker,
            immunity_seconds=self.decorator.immunity_seconds,
        )


@dataclass
class _Block:
    """One run of a block, and the messages published in it."""

    connection: BaseDatabaseWrapper
    published: Published | None = None

    def report_rollback(self) -> None:
        """Report a certain rollback to the broker, if it has a half message."""
        if self.published is not None and self.published.half is not None:
            report_rollback(self.connection, self.published.half, self.published.xid)


def _default_alias() -> str:
    """The default alias: the one that the routers choose for writes to the ledger."""
    from outbox.contrib.django.models import LedgerEntry

    return router.db_for_write(LedgerEntry)
