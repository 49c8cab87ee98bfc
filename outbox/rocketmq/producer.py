"""RocketMQ's producer with the state that the port needs: open transactions, and received checks.

The library answers a check at once, on one thread and for one message. Here a check goes into a queue, and the port's
`claim_checks` takes it from there. The answer returns by the way the check came.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import UUID

from outbox.errors import BrokerUnavailable
from outbox.rocketmq import client
from outbox.rocketmq.names import wire_name
from outbox.rocketmq.wire import CheckProperties, asked
from outbox.transaction import Decision

logger = logging.getLogger(__name__)

# The proxy forgets a check it has sent after 30 s (transactionDataExpireMillis); leave time for the answer.
_ANSWERABLE_SECONDS: Final = 25.0
# Each is a half message without its end; check-back settles those that are pushed out.
_MAX_OPEN: Final = 10_000

_RESOLUTIONS: Final = {
    Decision.COMMIT: client.TransactionResolution.COMMIT,
    Decision.ROLLBACK: client.TransactionResolution.ROLLBACK,
}


@dataclass(frozen=True, slots=True)
class OpenHalf:
    """A half message on the server, with the data needed to decide it."""

    endpoints: Any
    wire: Any
    broker_transaction: str


@dataclass(frozen=True, slots=True)
class PushedCheck:
    """One check from the server, with the data needed to answer it."""

    asked: CheckProperties
    half: OpenHalf
    came_at: float


class CheckingProducer(client.Producer):  # type: ignore[misc]
    """The library's producer. `topics` are those whose checks it receives: the server sends checks by topic."""

    def __init__(self, configuration: Any, topics: Iterable[str]) -> None:
        super().__init__(configuration, [wire_name(topic) for topic in topics], checker=self)
        self._lock = threading.Lock()
        self._pushed: defaultdict[str, list[PushedCheck]] = defaultdict(list)
        self._claimed: defaultdict[UUID, list[PushedCheck]] = defaultdict(list)
        self._open: OrderedDict[UUID, list[OpenHalf]] = OrderedDict()
        self.arrived = threading.Condition()

    # -- halves and their ends ------------------------------------------------------------------

    def send_half(self, transaction_id: UUID, wire: Any) -> Any:
        """Send one half message and keep what its end needs; returns the library's receipt."""
        receipt = self.send(wire, self.begin_transaction())
        half = OpenHalf(receipt.message_queue.endpoints, wire, receipt.transaction_id)
        with self._lock:
            self._open.setdefault(transaction_id, []).append(half)
            while len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
        return receipt

    def take_open(self, transaction_id: UUID) -> list[OpenHalf]:
        """Take out the half messages of a transaction id that this process has sent."""
        with self._lock:
            return self._open.pop(transaction_id, [])

    def decide(self, half: OpenHalf, decision: Decision, *, asked: bool = False) -> Future[Any]:
        """Send COMMIT or ROLLBACK; `asked`: as the answer to a check. Pass the future to `taken`.

        It uses no executor: at the exit of the interpreter every executor is shut down before the last ends are sent.
        """
        request = client.EndTransactionRequest()
        request.topic.name = half.wire.topic
        request.topic.resource_namespace = self.client_configuration.namespace
        request.message_id = half.wire.message_id
        request.transaction_id = half.broker_transaction
        request.resolution = _RESOLUTIONS[decision]
        source = client.TransactionSource
        request.source = source.SOURCE_SERVER_CHECK if asked else source.SOURCE_CLIENT
        sent: Future[Any] = self.rpc_client.end_transaction_async(
            half.endpoints, request, metadata=self.sign(), timeout=self.client_configuration.request_timeout
        )
        return sent

    @staticmethod
    def taken(sent: Future[Any]) -> None:
        """Wait until the server has accepted what `decide` sent. Raises the library's errors."""
        client.MessagingResultChecker.check(sent.result().status)

    # -- checks ---------------------------------------------------------------------------------

    def on_recover_orphaned_transaction_command(self, endpoints: Any, msg: Any, transaction_id: str) -> None:
        """The library calls it on its event loop with each check."""
        try:
            wire = client.WireMessage().fromProtobuf(msg)
            about = asked(wire)
        except Exception:
            logger.exception("a check about a message on %r cannot be read; the server sends it again", msg.topic.name)
            return
        if about is None:
            logger.warning(
                "RocketMQ asked about message %s on topic %r, which outbox did not send: it is not answered",
                wire.message_id,
                wire.topic,
            )
            return
        with self.arrived:
            half = OpenHalf(endpoints, wire, transaction_id)
            self._pushed[about.producer_group].append(PushedCheck(about, half, time.monotonic()))
            self.arrived.notify_all()

    def pushed_groups(self) -> list[str]:
        """The producer groups with unclaimed checks; call it holding `arrived`."""
        return [group for group, pushed in self._pushed.items() if pushed]

    def claim(self, producer_group: str, limit: int) -> list[CheckProperties]:
        """Claim for the caller the group's checks that can still be answered, one per transaction."""
        fresh_from = time.monotonic() - _ANSWERABLE_SECONDS
        with self.arrived:
            waiting = [one for one in self._pushed.pop(producer_group, []) if one.came_at >= fresh_from]
            taken: dict[UUID, CheckProperties] = {}
            left: list[PushedCheck] = []
            for one in waiting:
                transaction_id = one.asked.transaction_id
                if transaction_id in taken or len(taken) < limit:
                    taken[transaction_id] = one.asked
                    self._claimed[transaction_id].append(one)
                else:
                    left.append(one)
            if left:
                self._pushed[producer_group] = left
            return list(taken.values())

    def answer(self, transaction_id: UUID, decision: Decision) -> Callable[[], bool]:
        """Answer the claimed checks of a transaction; returns a function that waits, False for a lost answer.

        UNKNOWN is not sent. The proxy matches an answer with the newest copy of the half message that it knows, and
        then forgets that copy; a later decision would find none. So one decision answers all checks.
        """
        with self.arrived:
            claimed = self._claimed.pop(transaction_id, [])
        if decision is Decision.UNKNOWN:
            return lambda: True
        if not claimed:
            return lambda: False
        return partial(self._is_taken, transaction_id, self.decide(claimed[-1].half, decision, asked=True))

    def _is_taken(self, transaction_id: UUID, sent: Future[Any]) -> bool:
        try:
            self.taken(sent)
        except Exception as error:
            logger.info("the answer about %s was lost: %s", transaction_id, client.described(error))
            return False
        return True

    # -- routes ---------------------------------------------------------------------------------

    def accepted_types(self, topic: str) -> frozenset[int] | None:
        """The message types of a topic on the server; None if it does not have the topic.

        Raises BrokerUnavailable.
        """
        request = client.QueryRouteRequest()
        request.topic.name = wire_name(topic)
        request.endpoints.CopyFrom(self.client_configuration.rpc_endpoints.endpoints)
        try:
            answer = self.rpc_client.query_topic_route_async(
                self.client_configuration.rpc_endpoints,
                request,
                metadata=self.sign(),
                timeout=self.client_configuration.request_timeout,
            ).result()
            client.MessagingResultChecker.check(answer.status)
        except client.NotFoundException:
            return None
        except Exception as error:
            raise BrokerUnavailable(
                f"RocketMQ's proxy at {self.client_configuration.rpc_endpoints} cannot be asked about topic {topic!r}: "
                f"{client.described(error)}. Does it run, and is this the port of its gRPC (8081), not of a broker or "
                f"a name server?"
            ) from error
        return frozenset(kind for queue in answer.message_queues for kind in queue.accept_message_types)
