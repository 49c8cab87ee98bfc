"""`@transactional_message`: a function, method or view whose local transaction and message stand or fall together."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar, cast

from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections, router, transaction

from outbox import names
from outbox.contrib.django.blocks import watch_of
from outbox.contrib.django.check_functions import Lookup, register_lookup
from outbox.contrib.django.elsewhere import writes_stay_on
from outbox.contrib.django.ends import (
    Published,
    confirm_before_commit,
    mark_transaction,
    report_rollback,
    require_marked,
)
from outbox.contrib.django.messages import message, wait_of
from outbox.contrib.django.publishing import publish_bound
from outbox.errors import ConfigurationError
from outbox.faults import point

Function = TypeVar("Function", bound=Callable[..., Any])

_RESULT: Final = "result"


def transactional_message(
    topic: str,
    *,
    body: Any,
    key: object | Callable[..., object] = "",
    tag: str | Callable[..., str] = "",
    headers: Mapping[str, str] | Callable[..., Mapping[str, str]] | None = None,
    delay: float | timedelta | None = None,
    deliver_at: datetime | Callable[..., datetime] | None = None,
    check: Lookup | None = None,
    using: str | None = None,
    durable: bool = False,
) -> Callable[[Function], Function]:
    """Run the decorated function in `atomic()` together with a message that is delivered if and only if it commits.

    `body`, `key`, `tag`, `headers` and `deliver_at` are values, or functions whose parameters are named like
    parameters of the decorated function. One that has a parameter `result` gets what the function returned (an
    id made by the database, say): then the message is built after the function ran, before COMMIT. `check` is a
    look-up by message, `lambda m: Order.objects.filter(pk=m.key, status="paid").exists()`: with the ledger it
    runs beside it and a disagreement is reported; without the ledger it decides. `using` is the alias of the
    transaction; without it, it is the one that the database routers choose, and a write to another is refused.
    `durable` refuses to be nested in another transaction.

    Nested in another `atomic()` (ATOMIC_REQUESTS too) the message follows the outermost commit. Async functions
    run with the transaction on their own synchronous thread. An exception that leaves the function rolls back.
    Raises ConfigurationError at decoration for what cannot work.
    """
    given = {"body": body, "key": key, "tag": tag, "headers": headers, "deliver_at": deliver_at}

    names.check_topic(topic)
    wait_of(topic, delay, None)
    if delay is not None and deliver_at is not None:
        raise ConfigurationError(f"topic {topic!r}: give delay or deliver_at, not both.")

    def decorate(function: Function) -> Function:
        _refuse_unsuitable(function)
        checker = f"{function.__module__}:{function.__qualname__}"
        if check is not None:
            register_lookup(checker, check)
        call = _Call(
            function=function,
            topic=topic,
            parts={name: _part(function, name, value) for name, value in given.items()},
            delay=delay,
            using=using,
            durable=durable,
            checker=checker if check is not None else "",
        )
        return cast(Function, _wrap(function, call))

    return decorate


def _wrap(function: Callable[..., Any], call: _Call) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):
        # The transaction lives on one synchronous thread; the ORM calls that the coroutine awaits run on it too.
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
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"{function.__qualname__} is a generator: its body would run after the transaction. Decorate a function "
            f"that does its work before it returns."
        )
    if _RESULT in inspect.signature(function).parameters:
        raise ConfigurationError(
            f"{function.__qualname__} has a parameter called 'result', which @transactional_message uses for its "
            f"return value: call it something else."
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """One property of the message: a value, or a function and the names of the arguments it wants."""

    value: Any
    wanted: tuple[str, ...] | None = None

    @property
    def needs_result(self) -> bool:
        return self.wanted is not None and _RESULT in self.wanted

    def of(self, arguments: Mapping[str, Any]) -> Any:
        if self.wanted is None:
            return self.value
        return self.value(**{name: arguments[name] for name in self.wanted})


def _part(function: Callable[..., Any], what: str, value: Any) -> _Part:
    if not callable(value):
        return _Part(value)
    signature = inspect.signature(function)
    available = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    wanted = []
    for parameter in inspect.signature(value).parameters.values():
        if parameter.name in (*available, _RESULT) and parameter.kind is not parameter.POSITIONAL_ONLY:
            wanted.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise ConfigurationError(
                f"{what}= of {function.__qualname__} is a function with the parameter {parameter.name!r}: its "
                f"parameters must be named like those of {function.__qualname__} ({', '.join(available) or 'none'}), "
                f"or 'result' for what it returned."
            )
    return _Part(value, tuple(wanted))


@dataclass(frozen=True)
class _Call:
    """A decorated function with its message."""

    function: Callable[..., Any]
    topic: str
    parts: Mapping[str, _Part]
    delay: float | timedelta | None
    using: str | None
    durable: bool
    checker: str
    signature: inspect.Signature = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "signature", inspect.signature(self.function))

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Open the block, publish, run, leave the block; report a rollback where it is certain."""
        arguments = self._arguments(args, kwargs)
        alias = self.using or _default_alias()
        published: Published | None = None
        committing = False
        try:
            watched = None if self.using else alias
            with transaction.atomic(using=alias, durable=self.durable), writes_stay_on(watched, self.name):
                connection = connections[alias]
                watch_of(connection).bind(self.name)
                if self.is_late:
                    mark = mark_transaction(connection)
                    result = function(*args, **kwargs)
                    if not connection.needs_rollback:
                        require_marked(connection, mark, self.name)
                        published = self._publish(alias, {**arguments, _RESULT: result})
                else:
                    published = self._publish(alias, arguments)
                    result = function(*args, **kwargs)
                    confirm_before_commit(connection, published, self.name)
                point("producer.before_local_commit")
                committing = not connection.needs_rollback
        except BaseException:
            committing = False
            raise
        finally:
            if not committing and published is not None and published.half is not None:
                report_rollback(connections[alias], published.half, published.xid)
        return result

    @property
    def name(self) -> str:
        """The decorated function, for errors."""
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @property
    def is_late(self) -> bool:
        """Whether the message can only be built when the function has run."""
        return any(part.needs_result for part in self.parts.values())

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _publish(self, alias: str, arguments: Mapping[str, Any]) -> Published:
        values = {name: part.of(arguments) for name, part in self.parts.items()}
        built = message(self.topic, values.pop("body"), delay=self.delay, **values)
        return publish_bound([built], using=alias, checker=self.checker)


def _default_alias() -> str:
    """Where an app without a say of its own would write: what the routers choose for the ledger."""
    from outbox.contrib.django.models import LedgerEntry

    return router.db_for_write(LedgerEntry)
