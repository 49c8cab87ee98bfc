"""`@subscriber`: registers the function that handles the messages of a topic for a consumer group."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from importlib import import_module
from typing import Any, Final, TypeVar

from asgiref.sync import async_to_sync
from django.apps import apps
from django.utils.module_loading import module_has_submodule

from outbox import hooks
from outbox.contrib.django.settings.conf import aware
from outbox.contrib.django.subscribers.callables import (
    definition_of,
    is_asynchronous,
    is_generator,
    name_of,
    namespace_of,
    path_of,
    refuse_work_to_come,
    signature_of,
)
from outbox.declared_types import reading_options, topic_of
from outbox.errors import ConfigurationError, InvalidName, InvalidSubscription, TransactionUsageError
from outbox.filters.filter import parse_filter
from outbox.ports import AnyHandler
from outbox.retry import RetryPolicy
from outbox.subscription import Effects, Mode, OnError, Start, Subscription, SubscriptionOption
from outbox.utils.safe_text import error_line, shown_text

Function = TypeVar("Function", bound=Callable[..., Any])
Choice = TypeVar("Choice", bound=StrEnum)

_OPTIONS: Final = frozenset({"suspend_seconds", "max_suspends", "timeout_seconds", "broadcast"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Subscriber:
    """A registered handler. `using` is the alias of inbox and transaction; if it is None, the routers choose the alias.

    `names_start` is true if the project declares `start`, the first message for a group that is new to the topic.
    """

    subscription: Subscription
    handler: AnyHandler
    name: str
    idempotent: bool = True
    using: str | None = None
    names_start: bool = True


_subscribers: dict[tuple[str, str], Subscriber] = {}
_further: list[Callable[[], None]] = []


def subscriber(
    topic: str | type,
    *,
    group: str,
    tag: str | Sequence[str] = "",
    filter: str = "",
    mode: Mode | str = Mode.CONCURRENT,
    batch: int = 1,
    threads: int | None = None,
    retry: RetryPolicy | None = None,
    on_error: Mapping[type[BaseException], OnError | str] | None = None,
    start: Start | datetime | str | None = None,
    idempotent: bool = True,
    effects: Effects | str = Effects.INSIDE,
    using: str | None = None,
    options: Sequence[SubscriptionOption] = (),
    **further: Any,
) -> Callable[[Function], Function]:
    """Handle the messages of a topic for a consumer group.

    The function gets a `Delivery`, or with `batch` > 1 a list of deliveries. With the annotation `Delivery[OrderPaid]`
    of a declared type, `delivery.body` is a value of this type (docs/events.md). `topic` is a name, or a declared type
    with its topic. The function may be async. With
    `idempotent` (the default), the function runs inside `atomic()` on the alias `using`, and the inbox row is in the
    same transaction. Because of the inbox row, the effects of the function in that database happen once. A broadcast
    group has no inbox, because otherwise one instance would handle a message for all instances. `tag` selects messages
    by tags. `filter` selects messages by an SQL92 expression over headers (`"amount > 10"`).

    A group that is new to the topic begins at `start`, by default at the earliest message in the broker. If another
    group has handled messages of the topic, checks and workers warn until `start` is given. `mode`, `batch`, `threads`,
    `retry`, `on_error`, `start` and `further` (suspend_seconds, max_suspends, timeout_seconds, broadcast) are
    fields of `outbox.Subscription`, and so are the `options` of parts.

    With `effects="outside"`, the function runs without an open transaction and gets a `ClaimedDelivery`. The function
    calls other systems in `delivery.step(…)`, and writes in `with delivery.finish():` (docs/slow-calls.md).

    Put subscribers into the module `subscribers` of an installed app, because workers import this module. The decorator
    raises InvalidSubscription or InvalidFilter.
    """
    kind = None if isinstance(topic, str) else topic
    topic = topic_of(topic, f"@subscriber(group={group!r})")
    begins = Start.EARLIEST if start is None else start
    given: dict[str, Any] = {"mode": mode, "tag": tag, "filter": filter, "on_error": on_error, "start": begins}
    given |= {"batch": batch, "effects": effects, "options": options}
    chosen = {name: value for name, value in (("threads", threads), ("retry", retry)) if value is not None}
    subscription = _subscription(topic, group, {**given, **chosen}, further)
    once = idempotent and not subscription.broadcast
    if subscription.effects is Effects.OUTSIDE and not once:
        raise InvalidSubscription(
            f"@subscriber({topic!r}, group={group!r}): effects='outside' needs the inbox, which records that a message "
            "is done: remove idempotent=False."
        )

    def decorate(function: Function) -> Function:
        if subscription.effects is Effects.OUTSIDE and is_asynchronous(function):
            raise InvalidSubscription(
                f"{name_of(function)} is async, but a handler with effects='outside' must be a plain function, because "
                "`delivery.finish()` opens a transaction, and Django has no async transactions. Write `def`, and call "
                "async code with asgiref's async_to_sync inside `delivery.step(…)`."
            )
        registered = Subscriber(
            subscription=_with_reader(subscription, function, kind),
            handler=_handler(function),
            name=path_of(function),
            idempotent=once,
            using=using,
            names_start=start is not None,
        )
        register(registered)
        return function

    return decorate


def _with_reader(subscription: Subscription, function: Callable[..., Any], kind: type | None) -> Subscription:
    """Return the subscription with the option of a part that makes the bodies for this handler, if a part has one.

    `kind`: the type that was passed instead of a topic. Raises InvalidSubscription or ConfigurationError.
    """
    if subscription.reader is not None or not hooks.message_types:
        return subscription
    found = list(reading_options(_annotation(function), kind))
    return replace(subscription, options=[*subscription.options, *found]) if found else subscription


def _annotation(function: Callable[..., Any]) -> Any:
    """Return the annotation of the handler's first parameter; None without one. Raises InvalidSubscription."""
    try:
        parameters = list(signature_of(function).parameters.values())
    except (ValueError, TypeError):
        return None
    if not parameters or parameters[0].annotation is inspect.Parameter.empty:
        return None
    annotation = parameters[0].annotation
    if isinstance(annotation, str):
        # Only an annotation with a parameter can name a type of bodies.
        return _evaluated(annotation, function) if "[" in annotation else None
    return annotation


def _evaluated(annotation: str, function: Callable[..., Any]) -> Any:
    try:
        return eval(annotation, namespace_of(function))
    except Exception as error:
        raise InvalidSubscription(
            f"the annotation {annotation!r} of {name_of(function)} cannot be evaluated: {error_line(error)}. "
            "outbox reads the type of the body from it: import its names at runtime, not only for type checking."
        ) from error


def _subscription(topic: str, group: str, given: Mapping[str, Any], further: Mapping[str, Any]) -> Subscription:
    """Make the subscription from the parameters and options of `subscriber`.

    Raises InvalidSubscription or InvalidFilter.
    """
    where = f"@subscriber({topic!r}, group={group!r})"
    if unknown := sorted(set(further) - _OPTIONS):
        raise InvalidSubscription(
            f"{where}: there is no option {', '.join(unknown)}. The options besides the named parameters of "
            f"@subscriber are {', '.join(sorted(_OPTIONS))}."
        )
    options = {**given, **further}
    try:
        options["filter"] = _filter(where, options.pop("tag"), options["filter"])
        options["mode"] = _choice(Mode, "mode", options["mode"])
        options["effects"] = _choice(Effects, "effects", options["effects"])
        options["on_error"] = _reactions(options["on_error"])
        start = options["start"]
        options["start"] = aware(start) if isinstance(start, datetime) else _choice(Start, "start", start)
        subscription = Subscription(group=group, topic=topic, **options)
    except (ValueError, TypeError) as error:
        raise InvalidSubscription(f"{where}: {error}.") from error
    except InvalidName as error:
        raise InvalidSubscription(f"{where}: {error}") from error
    parse_filter(subscription.filter)
    return subscription


def _choice(kind: type[Choice], what: str, value: Any) -> Choice:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(str(item)) for item in kind)
        raise ValueError(f"{what}={value!r} must be one of {allowed}") from None


def _reactions(on_error: Any) -> dict[type[BaseException], OnError]:
    if on_error is not None and not isinstance(on_error, Mapping):
        raise TypeError(f"on_error={on_error!r} must map exception classes to reactions, like {{ValueError: 'stop'}}")
    return {kind: _choice(OnError, "on_error", reaction) for kind, reaction in (on_error or {}).items()}


def _filter(where: str, tag: str | Sequence[str], expression: str) -> str:
    tags = tag if isinstance(tag, str) else " || ".join(tag)
    if tags and expression:
        raise InvalidSubscription(
            f"{where}: pass tag or filter, not both. A filter can also test the tag, as in TAGS = 'paid'."
        )
    if expression:
        return expression if expression.startswith("sql:") else f"sql:{expression}"
    return tags


def _handler(function: Callable[..., Any]) -> AnyHandler:
    """Return the synchronous function that a worker calls.

    When this function returns, the work of the handler is done.
    """
    if not callable(function):
        raise InvalidSubscription(f"@subscriber takes a function, not {function!r}.")
    name = name_of(function)
    try:
        signature_of(function).bind(None)
    except TypeError:
        raise InvalidSubscription(
            f"{name} must accept one argument, which is the delivery, or the list of deliveries if batch > 1."
        ) from None
    except ValueError:
        pass  # The signature of some built-ins cannot be read.
    if is_generator(function):
        raise InvalidSubscription(
            f"{name} is a generator, but a subscriber must do its work before it returns: write a plain function."
        )
    # The coroutine of an async handler runs in an event loop of its own. Its ORM calls run on the handler's thread, and
    # so in the handler's transaction.
    call = async_to_sync(_to_its_end(function, name)) if is_asynchronous(function) else function

    def handle(given: Any) -> None:
        if (result := call(given)) is not None:
            refuse_work_to_come(result, name)

    # inspect.unwrap finds the project's function, for the crash kit.
    handle.__wrapped__ = function  # type: ignore[attr-defined]
    return handle


def _to_its_end(function: Callable[..., Any], name: str) -> Callable[[Any], Coroutine[Any, Any, Any]]:
    """Return an async function that calls an async handler, and fails if a task of the handler is not done.

    Raises TransactionUsageError. If other tasks run in the loop, as in a test, the function does not look.
    """

    async def run(given: Any) -> Any:
        is_own_loop = len(asyncio.all_tasks()) == 1
        result = await function(given)
        # A task that the handler has cancelled has no work left.
        if is_own_loop and len(tasks := [one for one in asyncio.all_tasks() if not one.cancelling()]) > 1:
            raise TransactionUsageError(
                f"{name} returned before {len(tasks) - 1} of its tasks were done, so asyncio would cancel them, and "
                "their writes and messages would be missing. The transaction was rolled back. Await the tasks, for "
                "example with asyncio.TaskGroup."
            )
        return result

    return run


def register(new: Subscriber) -> None:
    """Add a subscriber. Raises InvalidSubscription if the group has another function or filter for the topic."""
    key = (new.subscription.group, new.subscription.topic)
    known = _subscribers.get(key)
    if known is not None and _identity(known) != _identity(new):
        raise InvalidSubscription(
            f"group {key[0]!r} handles topic {key[1]!r} in {known.name} and in "
            f"{'another ' if known.name == new.name else ''}{new.name}, but each message would go to only one of these "
            "two functions. Give one function another group, or call both from one function. One function takes "
            "several tags as tag=['paid', 'refunded']."
        )
    _subscribers[key] = new


def _identity(registered: Subscriber) -> tuple[object, ...]:
    """Return what is the same if a module registers its subscriber again, as after importlib.reload."""
    # Only @subscriber wraps the function of a project.
    function = getattr(registered.handler, "__wrapped__", None)
    return registered.name, registered.subscription.filter, None if function is None else definition_of(function)


def subscribers() -> list[Subscriber]:
    """Return all subscribers registered so far. After `autodiscover`, these are all subscribers of the project."""
    return list(_subscribers.values())


def find_subscriber(subscription: Subscription) -> Subscriber | None:
    """Return the registered subscriber of a subscription, or None."""
    return _subscribers.get((subscription.group, subscription.topic))


def subscriptions(*, groups: Sequence[str] = ()) -> list[tuple[Subscription, AnyHandler]]:
    """Return the subscriptions and handlers of `groups`, or of all groups if `groups` is empty.

    Raises ConfigurationError for unknown groups.
    """
    known = {item.subscription.group for item in subscribers()}
    unknown = sorted(set(groups) - known)
    if unknown:
        raise ConfigurationError(
            f"no subscriber has the group {', '.join(unknown)}; use one of: {', '.join(sorted(known)) or 'none'}."
        )
    return [
        (item.subscription, item.handler) for item in subscribers() if not groups or item.subscription.group in groups
    ]


def unregister_all() -> None:
    """Remove all subscribers, for tests."""
    _subscribers.clear()


def add_discovery(further: Callable[[], None]) -> None:
    """Let `autodiscover` also call `further`, which registers subscribers.

    A second call with the same function has no effect.
    """
    if further not in _further:
        _further.append(further)


# The module of an installed app that has its subscribers.
_MODULE: Final = "subscribers"


def autodiscover() -> list[Subscriber]:
    """Import the module `subscribers` of every app that has this module. Return all subscribers.

    If a module cannot be imported, raises ConfigurationError with the name of the module and the cause.
    """
    for app in apps.get_app_configs():
        if app.module is None or app.name == "outbox.contrib.django" or not module_has_submodule(app.module, _MODULE):
            continue
        try:
            import_module(f"{app.name}.{_MODULE}")
        except InvalidSubscription:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"the subscribers in {app.name}.{_MODULE} cannot be imported: {type(error).__name__}: "
                f"{shown_text(error).rstrip('.')}."
            ) from error
    for further in _further:
        further()
    return subscribers()
