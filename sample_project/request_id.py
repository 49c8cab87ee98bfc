"""The id of a web request, in the log lines of the site and of all handlers that the request causes.

`grep ID var/logs/*.log` shows a payment with its effects in all apps. The site's middleware chooses the id. A message
has the id as a header, and the handlers' middleware takes it from there.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final

from django.http import HttpRequest, HttpResponse

from outbox import Delivery

HEADER: Final = "request-id"
_current: ContextVar[str] = ContextVar("request_id", default="-")


def of_request(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    """Middleware of the site: each request gets an id, which the answer has, too."""

    def middleware(request: HttpRequest) -> HttpResponse:
        token = _current.set(secrets.token_hex(6))
        try:
            response = get_response(request)
            response.headers[HEADER] = _current.get()
            return response
        finally:
            _current.reset(token)

    return middleware


def of_delivery(handle: Callable[[Any], None]) -> Callable[[Any], None]:
    """Middleware of the handlers: a handler runs under the id of its message."""

    def middleware(delivery: Delivery | Sequence[Delivery]) -> None:
        # The orders of a batch come from several requests.
        known = delivery.headers.get(HEADER, "-") if isinstance(delivery, Delivery) else "-"
        token = _current.set(known)
        try:
            handle(delivery)
        finally:
            _current.reset(token)

    return middleware


def headers() -> dict[str, str]:
    """The headers of a message that is published now."""
    return {HEADER: _current.get()}


class LogFilter(logging.Filter):
    """Gives every log record the attribute `request_id`."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the id and return True, because this filter removes no record."""
        record.request_id = _current.get()
        return True
