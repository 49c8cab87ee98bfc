"""Middleware around handlers: order, transaction, batches, async functions, errors, and what `check` refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import MiddlewareNotUsed

from outbox import Delivery
from outbox.contrib.django import publish, publish_many, subscriber
from outbox.contrib.django.operations.checks import check_settings
from outbox.contrib.django.subscribers import registry
from outbox.contrib.django.subscribers.inbox import InboxInvoker
from outbox.contrib.django.subscribers.middleware import with_middleware
from outbox.contrib.django.testing import in_memory_outbox
from outbox.contrib.django.worker.workers import consumer_runtime
from outbox.errors import ConfigurationError, PermanentError, TransactionUsageError
from outbox.ports import Disposition
from tests.django.effects.own_transaction import transaction_id
from tests.django.sharing import Waiting
from tests.django.shop.models import Effect
from tests.django.state import effects
from tests.django.support import consume
from tests.django.test_shared_transactions import deliveries

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")

Handle = Callable[[Any], Any]
SEEN: list[str] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


def outer(handle: Handle) -> Handle:
    def middleware(given: Any) -> None:
        SEEN.append("outer begins")
        handle(given)
        SEEN.append("outer ends")

    return middleware


class Inner:
    """A middleware may be a class, as in Django."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def __call__(self, given: Any) -> None:
        keys = [one.key for one in given] if isinstance(given, list) else given.key
        SEEN.append(f"inner {keys}")
        self.handle(given)


def noting(handle: Handle) -> Handle:
    def middleware(given: Delivery) -> None:
        Effect.objects.create(number=f"middleware {given.key} {transaction_id()}")
        handle(given)

    return middleware


def swallowing(handle: Handle) -> Handle:
    def middleware(given: Delivery) -> None:
        try:
            handle(given)
        except ValueError:
            SEEN.append("swallowed")

    return middleware


def refusing(handle: Handle) -> Handle:
    def middleware(given: Delivery) -> None:
        handle(given)
        raise PermanentError("no")

    return middleware


def unused(handle: Handle) -> Handle:
    raise MiddlewareNotUsed("not configured")


def is_broken(handle: Handle) -> Handle:
    raise LookupError("no DSN")


def is_the_middleware_itself(given: Delivery) -> None: ...


def takes_two(handle: Handle, further: object) -> None: ...


async def is_async(handle: Handle) -> None: ...


def returns_an_async_function(handle: Handle) -> Handle:
    async def middleware(given: Delivery) -> None: ...

    return middleware


def returns_a_coroutine(handle: Handle) -> Handle:
    async def later(given: Delivery) -> None: ...

    return lambda given: later(given)


def returns_two_parameters(handle: Handle) -> Callable[..., Any]:
    return lambda given, more: None


def path(function: Callable[..., Any]) -> str:
    return f"{__name__}.{function.__qualname__}"


def test_the_first_entry_is_the_outermost(outbox_settings: Callable[..., None]) -> None:
    outbox_settings(HANDLER_MIDDLEWARE=[path(outer), path(unused), path(Inner)])

    @subscriber("orders", group="effects")
    def handle(given: Delivery) -> None:
        SEEN.append(f"handler {given.key}")

    publish("orders", {}, key="1", at_once=True)
    assert consume().handled == 1
    assert SEEN == ["outer begins", "inner 1", "handler 1", "outer ends"]
    # A message that the inbox knows reaches neither handler nor middleware.
    [item] = registry.subscribers()
    [known] = deliveries("2")
    invoke = InboxInvoker()
    wrapped = with_middleware(item.handler)
    assert list(invoke(item.subscription, wrapped, [known], generation=1)) == [Disposition.HANDLED]
    assert list(invoke(item.subscription, wrapped, [known], generation=1)) == [Disposition.SKIPPED]
    assert SEEN.count("outer begins") == 2


def test_a_batch_is_one_call_with_the_list(outbox_settings: Callable[..., None]) -> None:
    outbox_settings(HANDLER_MIDDLEWARE=[path(Inner)])

    @subscriber("reminders", group="effects", batch=10)
    def handle(given: list[Delivery]) -> None:
        SEEN.append(f"handler {len(given)}")

    publish_many("reminders", [{}, {}], key="k", at_once=True)
    consume()
    assert SEEN == ["inner ['k', 'k']", "handler 2"]


@pytest.mark.parametrize("is_async_handler", [False, True], ids=["plain", "async"])
def test_its_writes_commit_with_the_handler(outbox_settings: Callable[..., None], is_async_handler: bool) -> None:
    outbox_settings(HANDLER_MIDDLEWARE=[path(noting)])

    def plain(given: Delivery) -> None:
        Effect.objects.create(number=f"handler {given.key} {transaction_id()}")
        if given.key == "bad":
            raise PermanentError("bad")

    async def asynchronous(given: Delivery) -> None:
        await sync_to_async(plain)(given)

    subscriber("orders", group="effects")(asynchronous if is_async_handler else plain)
    publish("orders", {}, key="good", at_once=True)
    publish("orders", {}, key="bad", at_once=True)
    consume()
    written = [number.split() for number in effects()]
    assert [(one, key) for one, key, _ in written] == [("handler", "good"), ("middleware", "good")]
    assert len({number for _, _, number in written}) == 1, "one transaction"


def test_each_message_of_a_shared_transaction_has_its_own_call(outbox_settings: Callable[..., None]) -> None:
    outbox_settings(HANDLER_MIDDLEWARE=[path(Inner), path(noting)])

    @subscriber("orders", group="effects")
    def handle(given: Delivery) -> None:
        if given.key == "2":
            raise PermanentError("bad")

    [item] = registry.subscribers()
    first, *others = deliveries("1", "2", "3")
    results = list(
        InboxInvoker().share(item.subscription, with_middleware(item.handler), first, Waiting(others), generation=1)
    )
    assert results[0] is Disposition.HANDLED and isinstance(results[1], PermanentError)
    assert SEEN == ["inner 1", "inner 2"]
    # The savepoint took the writes of the middleware of message 2 with it.
    assert [number.split()[1] for number in effects()] == ["1"]


def test_its_error_is_the_handlers_and_it_may_handle_an_error(outbox_settings: Callable[..., None]) -> None:
    outbox_settings(HANDLER_MIDDLEWARE=[path(swallowing)])

    @subscriber("orders", group="effects")
    def handle(given: Delivery) -> None:
        Effect.objects.create(number=given.key)
        raise ValueError

    publish("orders", {}, key="1", at_once=True)
    assert consume().handled == 1
    assert SEEN == ["swallowed"] and effects() == ["1"]
    outbox_settings(HANDLER_MIDDLEWARE=[path(refusing), path(swallowing)])
    publish("orders", {}, key="2", at_once=True)
    assert consume().failed == 1
    assert effects() == ["1"]


def test_the_in_memory_broker_calls_it(outbox_settings: Callable[..., None]) -> None:
    outbox_settings(HANDLER_MIDDLEWARE=[path(outer)])

    @subscriber("orders", group="effects")
    def handle(given: Delivery) -> None:
        SEEN.append("handler")

    with in_memory_outbox() as outbox:
        publish("orders", {}, key="1", at_once=True)
        assert outbox.drain() == 1
    assert SEEN == ["outer begins", "handler", "outer ends"]


def test_without_middleware_the_handler_is_called_directly() -> None:
    def handler(given: Any) -> None: ...

    assert with_middleware(handler) is handler


def test_a_coroutine_of_a_middleware_is_refused(outbox_settings: Callable[..., None]) -> None:
    outbox_settings(HANDLER_MIDDLEWARE=[path(returns_a_coroutine)])
    wrapped: Any = with_middleware(lambda given: None)
    with pytest.raises(TransactionUsageError, match="returned a coroutine"):
        wrapped(deliveries("1")[0])


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("nowhere.at.all", "cannot be imported"),
        (f"{__name__}.SEEN", "must be a function that takes the handler"),
        (path(takes_two), "takes one argument"),
        (path(is_async), "must be a plain function"),
        (path(is_the_middleware_itself), "returned None"),
        (path(is_broken), "LookupError: no DSN"),
        (path(returns_two_parameters), "a plain function that takes one argument"),
        (path(returns_an_async_function), "must return a plain function"),
    ],
)
def test_check_and_worker_refuse_what_cannot_work(outbox_settings: Callable[..., None], wrong: str, text: str) -> None:
    subscriber("orders", group="effects")(lambda given: None)
    outbox_settings(HANDLER_MIDDLEWARE=[path(outer), wrong])
    [found] = [one for one in check_settings() if one.id == "outbox.E037"]
    assert text in found.msg and "OUTBOX['HANDLER_MIDDLEWARE'][1]" in found.msg
    with pytest.raises(ConfigurationError, match="HANDLER_MIDDLEWARE"):
        consumer_runtime()
