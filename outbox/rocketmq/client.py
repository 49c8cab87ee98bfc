"""The RocketMQ client library, as this engine uses it: the one module that imports it.

Two habits of the library are kept from the application: at import it opens a log file in the home directory and closes
the application's log handlers (`logging.config.dictConfig`), so it is given a logger of ours instead; and its event
loop does not survive a fork, where it would wait for ever, so that a use after a fork is refused (`refuse_after_fork`).
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import types
from typing import Any, Final
from urllib.parse import urlsplit

from outbox.errors import BrokerUnavailable, ConfigurationError
from outbox.rocketmq.admin import brokers_of

logger = logging.getLogger(__name__)

SCHEME: Final = "rocketmq"
DEFAULT_PORT: Final = 8081


def _import_client() -> None:
    quiet = types.ModuleType("rocketmq.v5.log")
    # Its errors are ours to report, with what was being done.
    theirs = logging.getLogger("outbox.rocketmq.library")
    theirs.setLevel(logging.CRITICAL)
    quiet.logger = theirs  # type: ignore[attr-defined]
    sys.modules.setdefault("rocketmq.v5.log", quiet)


_import_client()
try:
    import grpc
    from rocketmq import ClientConfiguration, Credentials, FilterExpression, Producer, SimpleConsumer
    from rocketmq import Message as WireMessage
    from rocketmq.grpc_protocol import (
        Code,
        EndTransactionRequest,
        ForwardMessageToDeadLetterQueueRequest,
        QueryRouteRequest,
        TransactionResolution,
        TransactionSource,
    )
    from rocketmq.v5.exception import (
        BadRequestException,
        ForbiddenException,
        IllegalArgumentException,
        NotFoundException,
        PayloadEmptyException,
        PayloadTooLargeException,
        RequestHeaderFieldsTooLargeException,
        TooManyRequestsException,
        UnauthorizedException,
        UnsupportedException,
    )
    from rocketmq.v5.util import MessagingResultChecker
except ModuleNotFoundError as error:  # pragma: no cover
    raise ConfigurationError(
        f"the RocketMQ engine needs its client library ({error.name} is missing): "
        f"install outbox-transactional[rocketmq]."
    ) from error

__all__ = [
    "REFUSALS",
    "ClientConfiguration",
    "Code",
    "EndTransactionRequest",
    "FilterExpression",
    "ForwardMessageToDeadLetterQueueRequest",
    "KnownConsumer",
    "MessagingResultChecker",
    "NotFoundException",
    "Producer",
    "QueryRouteRequest",
    "TransactionResolution",
    "TransactionSource",
    "WireMessage",
    "configuration",
    "described",
    "keep_known",
    "refuse_after_fork",
    "unrouted",
]

# The server, or the library before it asks the server, said no: nothing was stored by this attempt or an earlier one.
REFUSALS: Final = (
    BadRequestException,
    ForbiddenException,
    IllegalArgumentException,
    NotFoundException,
    PayloadEmptyException,
    PayloadTooLargeException,
    RequestHeaderFieldsTooLargeException,
    TooManyRequestsException,
    UnauthorizedException,
    UnsupportedException,
)

_TELL_SECONDS: Final = 2.0
_KNOWN_SECONDS: Final = 5.0
_ROUTES_SECONDS: Final = 5.0

_started_in: int | None = None


def configuration(url: str, *, timeout_seconds: float = 3.0) -> Any:
    """The library's configuration for `rocketmq://[ACCESS_KEY:SECRET@]HOST:PORT`. Raises ConfigurationError.

    The brokers that the address may name are for their administration ports only (outbox.rocketmq.admin.brokers_of).
    """
    parts = urlsplit(url)
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError:
        port = 0
    if parts.scheme != SCHEME or not parts.hostname or not port or parts.path.strip("/"):
        raise ConfigurationError("the address of RocketMQ's proxy must be rocketmq://HOST:PORT (8081 unless named).")
    brokers_of(url)
    credentials = Credentials(parts.username or "", parts.password or "")
    # Whole seconds, and for every request.
    return ClientConfiguration(f"{parts.hostname}:{port}", credentials, request_timeout=math.ceil(timeout_seconds))


def refuse_after_fork() -> None:
    """Raise BrokerUnavailable in a process that was forked from one in which the library had been started."""
    global _started_in
    if _started_in is None:
        _started_in = os.getpid()
    elif _started_in != os.getpid():
        raise BrokerUnavailable(
            f"RocketMQ's client was started in process {_started_in}, of which this one ({os.getpid()}) is a fork: it "
            f"would wait for ever here. Publish nothing before the fork (at import, in a preloaded server)."
        )


class KnownConsumer(SimpleConsumer):  # type: ignore[misc]
    """The library's consumer, which can wait until the proxy knows it: before, every receive is an error there."""

    def wait_until_known(self) -> None:
        """At most some seconds; what comes too early is tried again."""
        self._init_settings_event.wait(_KNOWN_SECONDS)


def keep_known(started: Any) -> None:
    """Tell the proxies again who this client is, as one that was restarted has to be; to be called every few seconds.

    The library does so every five minutes only. Until then a restarted proxy hands out no messages and sends no checks,
    which the server counts all the same. The library asks for the route of a topic once, at its start, and drops a
    failure: a topic without a route has no proxies to tell, so the route is asked for first.
    """
    deadline = time.monotonic() + _ROUTES_SECONDS
    for topic in unrouted(started):
        # False after a timeout, which each topic would wait for.
        if not started.route_manager.update_topic_route(topic) and time.monotonic() > deadline:
            break
    for endpoints in list(started.route_manager.get_all_endpoints().values()):
        try:
            settings = started.sync_setting_req(endpoints)
            started.rpc_client.telemetry_write_async(endpoints, settings).result(_TELL_SECONDS)
        except TimeoutError:
            # The stream waits for the proxy, and will tell it.
            continue
        except Exception as error:
            logger.debug("the stream to %s is made anew: %s", endpoints, described(error))
            started.on_new_endpoints(endpoints)


def unrouted(started: Any) -> list[str]:
    """The topics, by their names in RocketMQ, whose route the client does not know: no check about them comes here."""
    # The library keeps the routes in a private map and has no question that reads it without asking the server.
    known = set(started.route_manager._ClientRouteManager__topic_route_cache.keys())
    return sorted(set(started.topics) - known)


def described(error: BaseException) -> str:
    """An error of the library in one line."""
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {str(error).strip()}"
