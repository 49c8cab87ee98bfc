"""The RocketMQ client library for this engine: the only module that imports it.

Two habits of the library are kept from the application. At import it opens a log file in the home directory and closes
the application's log handlers (`logging.config.dictConfig`); so it gets a logger of this package instead. Its event
loop does not survive a fork and would wait for ever; so a use after a fork is refused (`refuse_after_fork`).
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
    # This package reports the library's errors itself, with the failed operation.
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

# The server, or the library before it asks the server, refused: no attempt has stored anything.
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

    Broker addresses in it are for their administration ports only (outbox.rocketmq.admin.brokers_of).
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
    # Whole seconds; they apply to every request.
    return ClientConfiguration(f"{parts.hostname}:{port}", credentials, request_timeout=math.ceil(timeout_seconds))


def refuse_after_fork() -> None:
    """Raise BrokerUnavailable in a process forked from one that had started the library."""
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
    """The library's consumer, extended to wait until the proxy knows it: before that, every receive is an error."""

    def wait_until_known(self) -> None:
        """Wait at most some seconds; a receive that comes too early is tried again."""
        self._init_settings_event.wait(_KNOWN_SECONDS)


def keep_known(started: Any) -> None:
    """Announce this client to the proxies again; call it every few seconds, because a proxy may have been restarted.

    The library announces itself only every five minutes. Until then a restarted proxy delivers no messages and sends no
    checks, and the server counts these checks. The library asks for the route of a topic once, at its start, and
    drops a failure. Without a route there is no proxy to announce to, so this asks for the route first.
    """
    deadline = time.monotonic() + _ROUTES_SECONDS
    for topic in unrouted(started):
        # It returns False after a timeout; stop here, because each further topic would wait as long.
        if not started.route_manager.update_topic_route(topic) and time.monotonic() > deadline:
            break
    for endpoints in list(started.route_manager.get_all_endpoints().values()):
        try:
            settings = started.sync_setting_req(endpoints)
            started.rpc_client.telemetry_write_async(endpoints, settings).result(_TELL_SECONDS)
        except TimeoutError:
            # The stream waits for the proxy and announces the client itself.
            continue
        except Exception as error:
            logger.debug("the stream to %s is opened again: %s", endpoints, described(error))
            started.on_new_endpoints(endpoints)


def unrouted(started: Any) -> list[str]:
    """The topics without a known route, by their names in RocketMQ: the client receives no checks about them."""
    # The library keeps the routes in a private map; its public functions would ask the server.
    known = set(started.route_manager._ClientRouteManager__topic_route_cache.keys())
    return sorted(set(started.topics) - known)


def described(error: BaseException) -> str:
    """An error of the library in one line."""
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {str(error).strip()}"
