"""The RocketMQ client library. Only this module of the engine imports it.

The module protects the application from two habits of the library. At import, the library opens a log file in the home
directory and closes the application's log handlers (`logging.config.dictConfig`). So it gets a logger of this package
instead. Its event loop does not survive a fork: a call after a fork would wait for ever. So a use after a fork is
refused (`refuse_after_fork`).
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
    # This package reports the library's errors itself, together with the operation that failed.
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

# The library raises these errors if the server refuses a request, or if the library itself refuses it before asking the
# server. In both cases, no attempt has stored a message.
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
    """Return the library's configuration for `rocketmq://[ACCESS_KEY:SECRET@]HOST:PORT`. Raises ConfigurationError.

    The URL may also have the addresses of administration ports, which outbox.rocketmq.admin.brokers_of reads.
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
    # The library takes whole seconds, and applies them to every request.
    return ClientConfiguration(f"{parts.hostname}:{port}", credentials, request_timeout=math.ceil(timeout_seconds))


def refuse_after_fork() -> None:
    """Raise BrokerUnavailable if the library was started in another process, of which this process is a fork."""
    global _started_in
    if _started_in is None:
        _started_in = os.getpid()
    elif _started_in != os.getpid():
        raise BrokerUnavailable(
            f"RocketMQ's client was started in process {_started_in}, and this process ({os.getpid()}) is a fork of "
            "it: the client would wait for ever here. Publish nothing before the fork (at import, in a preloaded "
            "server)."
        )


class KnownConsumer(SimpleConsumer):  # type: ignore[misc]
    """The library's consumer. It can also wait until the proxy knows it, because every receive fails before that."""

    def wait_until_known(self) -> None:
        """Wait some seconds at most. A receive that comes too early fails and is tried again."""
        self._init_settings_event.wait(_KNOWN_SECONDS)


def keep_known(started: Any) -> None:
    """Announce this client to the proxies again. Call it every few seconds, because a proxy may have been restarted.

    The library announces the client only every five minutes. Until then a restarted proxy delivers no messages and
    sends no checks, but the server counts these checks. The library asks for the route of a topic once, at its start,
    and ignores a failure. Without a route the client knows no proxy, so this function asks for missing routes first.
    """
    deadline = time.monotonic() + _ROUTES_SECONDS
    for topic in unrouted(started):
        # The update returns False after a timeout. Stop then, because each further topic would wait as long.
        if not started.route_manager.update_topic_route(topic) and time.monotonic() > deadline:
            break
    for endpoints in list(started.route_manager.get_all_endpoints().values()):
        try:
            settings = started.sync_setting_req(endpoints)
            started.rpc_client.telemetry_write_async(endpoints, settings).result(_TELL_SECONDS)
        except TimeoutError:
            # The stream waits for the proxy, and then announces the client itself.
            continue
        except Exception as error:
            logger.debug("the stream to %s is opened again: %s", endpoints, described(error))
            started.on_new_endpoints(endpoints)


def unrouted(started: Any) -> list[str]:
    """Return the topics without a known route, by their names in RocketMQ. The client gets no checks about them."""
    # The library keeps the routes in a private attribute. Its public functions would ask the server.
    known = set(started.route_manager._ClientRouteManager__topic_route_cache.keys())
    return sorted(set(started.topics) - known)


def described(error: BaseException) -> str:
    """Return an error of the library as one line."""
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {str(error).strip()}"
