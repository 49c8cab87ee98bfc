"""Middleware around handlers: the functions that OUTBOX['HANDLER_MIDDLEWARE'] names.

    def timing(handle):
        def middleware(delivery):
            began = time.monotonic()
            try:
                handle(delivery)
            finally:
                logger.info("%s took %.3f s", delivery.message_id, time.monotonic() - began)

        return middleware

The form is that of Django's MIDDLEWARE: the first entry is the outermost. A middleware runs inside the transaction of
its message, after the inbox row is written. An error of a middleware is an error of the handler. With `batch` > 1 the
middleware gets the list of deliveries, as the handler does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from django.core.exceptions import MiddlewareNotUsed

from outbox import hooks
from outbox.contrib.django.settings.conf import get_settings, imported
from outbox.contrib.django.subscribers.callables import (
    is_asynchronous,
    is_generator,
    refuse_work_to_come,
    signature_of,
)
from outbox.errors import ConfigurationError
from outbox.ports import AnyHandler
from outbox.subscription import Subscription
from outbox.utils.safe_text import error_line, shown_text

logger = logging.getLogger(__name__)


def with_middleware(handler: AnyHandler) -> AnyHandler:
    """Return the handler inside all middleware of the settings; without middleware, the handler itself.

    Raises ConfigurationError if a middleware cannot be imported or made.
    """
    made: Any = handler
    paths = get_settings().handler_middleware
    for place, path in reversed(list(enumerate(paths))):
        made = _around(made, f"OUTBOX['HANDLER_MIDDLEWARE'][{place}]", path)
    return made  # type: ignore[no-any-return]


def with_options(subscription: Subscription, handler: AnyHandler) -> AnyHandler:
    """Return the handler inside the wrappers of the subscription's options (`hooks.add_handler_wrapper`)."""
    for option in subscription.options:
        if (path := hooks.handler_wrappers.get(type(option))) is not None:
            handler = hooks.resolved(path)(option, subscription, handler)
    return handler


def _around(handle: Callable[[Any], Any], where: str, path: str) -> Callable[[Any], Any]:
    """Return the middleware at a dotted path around `handle`, which is a plain function also for an async handler."""
    factory = imported(where, path)
    if not callable(factory):
        raise ConfigurationError(f"{where} = {path!r} must be a function that takes the handler, not {factory!r}.")
    if is_asynchronous(factory) or not _takes_one(factory):
        raise ConfigurationError(
            f"{where} = {path!r} must be a plain function that takes one argument, the handler, and returns the "
            "function to call in its place."
        )
    try:
        made = factory(handle)
    except MiddlewareNotUsed as reason:
        logger.debug("%s = %r is not used: %s", where, path, shown_text(reason))
        return handle
    except Exception as error:
        raise ConfigurationError(
            f"{where} = {path!r} failed before the first message: {error_line(error)}. Correct the "
            "function, or let it raise django.core.exceptions.MiddlewareNotUsed."
        ) from error
    if not callable(made) or not _takes_one(made) or is_generator(made) or is_asynchronous(made):
        raise ConfigurationError(
            f"{where} = {path!r} returned {made!r}, but it must return a plain function that takes one argument: the "
            "delivery, or the list of deliveries if batch > 1. A plain middleware wraps async handlers, too."
        )

    def middleware(given: Any) -> None:
        refuse_work_to_come(made(given), path)

    return middleware


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        signature_of(function).bind(None)
    except TypeError:
        return False
    except ValueError:
        return True  # The signature of some built-ins cannot be read.
    return True
