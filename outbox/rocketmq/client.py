"""The RocketMQ client library. Only this module of the engine imports the library.

The module protects the application from three habits of the library. First, at import the library opens a log file in
the home directory and closes the application's log handlers (`logging.config.dictConfig`). So this module gives the
library a logger of this package. Second, the library's event loop does not work in a forked process, where a call would
wait for ever. So `refuse_after_fork` refuses such a call. Third, gRPC's handlers of `fork` end the child with SIGSEGV
or SIGBUS if another thread is in gRPC, also the child of `subprocess.run(user=…)`. No forked process uses gRPC (see
second), so the handlers are switched off.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from outbox.errors import BrokerUnavailable, ConfigurationError
from outbox.rocketmq.address import parse
from outbox.utils.safe_text import error_line

logger = logging.getLogger(__name__)


def _import_client() -> None:
    quiet = types.ModuleType("rocketmq.v5.log")
    # This package reports the library's errors itself, together with the operation that failed.
    theirs = logging.getLogger("outbox.rocketmq.library")
    theirs.setLevel(logging.CRITICAL)
    # The library calls the deprecated method `warn` before it opens a broken stream again. Where warnings are errors,
    # this call would raise, and the stream would stay broken.
    theirs.warn = theirs.warning  # type: ignore[method-assign]
    quiet.logger = theirs  # type: ignore[attr-defined]
    sys.modules.setdefault("rocketmq.v5.log", quiet)


_import_client()
# gRPC 1.85 reads the variable at its first call. A project that needs the handlers sets the variable itself.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
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
    "OF_THE_SERVER",
    "REFUSALS",
    "BrokerChoice",
    "ClientConfiguration",
    "Code",
    "EndTransactionRequest",
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

# The library raises these errors if the server refuses a request, or if the library refuses to send the request. In
# both cases, RocketMQ has stored no message.
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

# Refusals that depend on the server and not on the message. An operator can mend them, or they pass.
OF_THE_SERVER: Final = (ForbiddenException, NotFoundException, TooManyRequestsException, UnauthorizedException)

_TELL_SECONDS: Final = 2.0
_KNOWN_SECONDS: Final = 5.0
_ROUTES_SECONDS: Final = 5.0
# If no thread has asked a group of brokers for this time per group, a thread asks it, even if others have messages.
_NEGLECTED_SECONDS: Final = 5.0

_started_in: int | None = None


def configuration(url: str, *, timeout_seconds: float = 3.0) -> Any:
    """Return the library's configuration for the address of a cluster (outbox.rocketmq.address).

    The namespace and the encryption are not a part of it. Raises ConfigurationError.
    """
    address = parse(url)
    credentials = Credentials(address.access_key, address.secret)
    # The library accepts only whole seconds for this timeout, and uses the timeout for every request.
    return ClientConfiguration(
        ";".join(map(str, address.proxies)),
        credentials,
        request_timeout=math.ceil(timeout_seconds),
    )


def refuse_after_fork() -> None:
    """Raise BrokerUnavailable if the library was started in another process, of which this process is a fork."""
    global _started_in
    if _started_in is None:
        _started_in = os.getpid()
    elif _started_in != os.getpid():
        raise BrokerUnavailable(
            f"RocketMQ's client was started in process {_started_in}, and this process ({os.getpid()}) is a fork "
            "of that process. In a forked process, the client would wait for ever. Publish nothing before the fork (at "
            "import, in a preloaded server)."
        )


class BrokerChoice:
    """Chooses the group of brokers from which a thread receives next.

    A receive asks one group of brokers, and waits some seconds if this group has no message. The library chooses the
    group by chance. So if only one group has messages, most threads of the library wait at the other groups.

    This class leaves one thread at each group without messages. All other threads go to the groups that have messages.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asking: Counter[str] = Counter()
        self._asked_at: dict[str, float] = {}
        self._with_messages: set[str] = set()

    def choose(self, groups: Sequence[str], last: str | None, *, now: float) -> str:
        """Return one of `groups`. The caller asks this group, and then calls `answered`.

        `last` is the group that this thread asked before.
        """
        with self._lock:
            chosen = self._chosen(groups, last, now)
            self._asking[chosen] += 1
            return chosen

    def _chosen(self, groups: Sequence[str], last: str | None, now: float) -> str:
        neglected_from = now - _NEGLECTED_SECONDS * len(groups)
        neglected = [
            one for one in groups if not self._asking[one] and self._asked_at.get(one, -math.inf) <= neglected_from
        ]
        if neglected:
            return min(neglected, key=self._least_asked)
        if last is not None and last in groups and (last in self._with_messages or not self._asking[last]):
            return last
        return min(self._with_messages.intersection(groups) or groups, key=self._least_asked)

    def _least_asked(self, group: str) -> tuple[int, float]:
        return self._asking[group], self._asked_at.get(group, -math.inf)

    def answered(self, group: str, *, has_messages: bool, now: float) -> None:
        """Note that a receive from this group has ended. After an error, `has_messages` is False."""
        with self._lock:
            self._asking[group] -= 1
            self._asked_at[group] = now
            if has_messages:
                self._with_messages.add(group)
            else:
                self._with_messages.discard(group)


class KnownConsumer(SimpleConsumer):  # type: ignore[misc]
    """The library's consumer of one topic, with two additions: it can wait until the proxy has registered it, and its
    threads choose the groups of brokers by `BrokerChoice`.

    Until the proxy has registered the consumer, every receive fails.
    """

    def __init__(self, configuration: Any, group: str, topic: str, *, await_seconds: int, tls: bool) -> None:
        everything = {topic: FilterExpression()}
        super().__init__(configuration, group, everything, await_duration=await_seconds, tls_enable=tls)
        self._topic = topic
        self._choice = BrokerChoice()
        self._of_thread = threading.local()

    def wait_until_known(self) -> None:
        """Wait at most some seconds until the proxy has registered this consumer.

        If the consumer receives before the registration, the receive fails, and the consumer tries again.
        """
        self._init_settings_event.wait(_KNOWN_SECONDS)

    def receive(self, most: int, invisible_seconds: int) -> Sequence[Any]:
        """Receive at most `most` messages from one group of brokers. Raises the library's errors.

        Raises BrokerUnavailable if no group of brokers with a master has the topic.
        """
        if not self.is_running:
            raise BrokerUnavailable("the consumer has stopped.")
        route = self._retrieve_topic_route_data(self._topic)
        readable = (one for one in route.message_queues if one.is_readable() and one.is_master_broker())
        queues = {one.message_queue0().broker.name: one for one in readable}
        if not queues:
            raise BrokerUnavailable(f"no group of brokers with a master has topic {self._topic!r}.")
        group = self._choice.choose(sorted(queues), getattr(self._of_thread, "last", None), now=time.monotonic())
        self._of_thread.last = group
        received: Sequence[Any] = ()
        try:
            request = self._receive_req(self._topic, queues[group], most, False, invisible_seconds, self.await_duration)
            timeout = self.client_configuration.request_timeout + self.await_duration
            received = self._receive(queues[group], request, timeout)
        finally:
            self._choice.answered(group, has_messages=bool(received), now=time.monotonic())
        return received


def keep_known(started: Any) -> None:
    """Announce this client to the proxies again.

    Call this function every few seconds, because a proxy may have restarted.

    The library announces the client only every five minutes. Until the next announcement, a restarted proxy delivers no
    messages and sends no checks to the client, but the server counts each check as if it had been sent. The library
    reads the route of a topic once, when the client starts, and ignores a failure. Without a route the client has no
    proxy for the topic, so this function reads missing routes first.
    """
    deadline = time.monotonic() + _ROUTES_SECONDS
    for topic in unrouted(started):
        # `update_topic_route` returns False after a timeout. If the deadline has passed when this happens, the loop
        # stops, because the call for each further topic would also wait until its timeout.
        if not started.route_manager.update_topic_route(topic) and time.monotonic() > deadline:
            break
    for endpoints in list(started.route_manager.get_all_endpoints().values()):
        try:
            settings = started.sync_setting_req(endpoints)
            started.rpc_client.telemetry_write_async(endpoints, settings).result(_TELL_SECONDS)
        except TimeoutError:
            # The library's stream waits for the proxy. As soon as the proxy answers, the stream announces the client.
            continue
        except Exception as error:
            logger.debug("the stream to proxy %s is opened again: %s", endpoints, described(error))
            started.on_new_endpoints(endpoints)


def unrouted(started: Any) -> list[str]:
    """Return the names (in RocketMQ) of topics whose route is unknown.

    The client gets no checks for messages of these topics.
    """
    # This function reads a private attribute of the library, because the library's public functions for routes would
    # send a request to the server.
    known = set(started.route_manager._ClientRouteManager__topic_route_cache.keys())
    return sorted(set(started.topics) - known)


def described(error: BaseException) -> str:
    """Return an error of the library as one line."""
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {error.details()}"
    return error_line(error)
