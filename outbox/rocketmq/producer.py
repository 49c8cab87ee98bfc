"""RocketMQ's producer with two additions: it remembers its open transactions, and queues the checks that it receives.

The library answers each check at once, on one thread. This producer puts each check into a queue, from which the port's
`claim_checks` takes it. The answer is sent over the connection on which the check came. RocketMQ sends a check to any
producer that has used the topic, in any process, and counts unanswered checks. So each process that publishes must
answer checks on a thread, and cannot leave the checks to a worker.
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

from outbox.checkback import CheckBack
from outbox.errors import BrokerUnavailable
from outbox.ports import Broker, Checker
from outbox.rocketmq import client
from outbox.rocketmq.declarations import in_namespace, wire_name
from outbox.rocketmq.wire import CheckProperties, asked
from outbox.transaction import Decision
from outbox.utils.safe_text import printable

logger = logging.getLogger(__name__)

# The proxy refuses an answer later than 30 s after the check (transactionDataExpireMillis). The limit here is shorter
# than 30 s, so that there is time to send the answer.
_ANSWERABLE_SECONDS: Final = 25.0
# The producer remembers at most this number of transactions without an end message. If there are more transactions, the
# producer forgets the oldest transactions, and check-back decides them.
_MAX_OPEN: Final = 10_000
_LOOK_SECONDS: Final = 5.0

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
    """The library's producer.

    The producer receives the checks about messages of `topics`, because the server sends checks per topic.
    """

    def __init__(self, configuration: Any, topics: Iterable[str], *, tls: bool = False, namespace: str = "") -> None:
        self._namespace = namespace
        super().__init__(configuration, [self._named(topic) for topic in topics], checker=self, tls_enable=tls)
        self._lock = threading.Lock()
        self._pushed: defaultdict[str, list[PushedCheck]] = defaultdict(list)
        self._claimed: defaultdict[UUID, list[PushedCheck]] = defaultdict(list)
        self._open: OrderedDict[UUID, list[OpenHalf]] = OrderedDict()
        self.arrived = threading.Condition()

    def _named(self, topic: str) -> str:
        return in_namespace(self._namespace, wire_name(topic))

    # -- half messages and their ends -----------------------------------------------------------

    def send_half(self, transaction_id: UUID, wire: Any) -> Any:
        """Send one half message and store the data that its end message needs. Return the library's receipt."""
        receipt = self.send(wire, self.begin_transaction())
        half = OpenHalf(receipt.message_queue.endpoints, wire, receipt.transaction_id)
        with self._lock:
            self._open.setdefault(transaction_id, []).append(half)
            while len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
        return receipt

    def take_open(self, transaction_id: UUID) -> list[OpenHalf]:
        """Remove and return the half messages of a transaction id that this process has sent."""
        with self._lock:
            return self._open.pop(transaction_id, [])

    def decide(self, half: OpenHalf, decision: Decision, *, asked: bool = False) -> Future[Any]:
        """Send COMMIT or ROLLBACK.

        `asked` is True if the decision is the answer to a check. Pass the returned future to `taken`.

        This method uses no executor, because the interpreter shuts down every executor before the last end messages are
        sent.
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
        """Wait until the server has accepted the decision that `decide` sent. Raises the library's errors."""
        client.MessagingResultChecker.check(sent.result().status)

    # -- checks ---------------------------------------------------------------------------------

    def on_recover_orphaned_transaction_command(self, endpoints: Any, msg: Any, transaction_id: str) -> None:
        """Queue a check. The library calls this method on its event loop."""
        try:
            wire = client.WireMessage().fromProtobuf(msg)
            about = asked(wire)
        except Exception as error:
            logger.error(
                "a check about a message on topic %r cannot be read; the server sends the check again",
                msg.topic.name,
                exc_info=printable(error),
            )
            return
        if about is None:
            logger.warning(
                "RocketMQ sent a check about message %s on topic %r, which outbox did not send, so this process does "
                "not answer the check",
                wire.message_id,
                wire.topic,
            )
            return
        with self.arrived:
            half = OpenHalf(endpoints, wire, transaction_id)
            self._pushed[about.producer_group].append(PushedCheck(about, half, time.monotonic()))
            self.arrived.notify_all()

    def pushed_groups(self) -> list[str]:
        """Return the producer groups with unclaimed checks. The caller must hold the lock `arrived`."""
        return [group for group, pushed in self._pushed.items() if pushed]

    def claim(self, producer_group: str, limit: int) -> list[CheckProperties]:
        """Claim the group's checks that can still be answered, one per transaction."""
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
        """Answer the claimed checks of a transaction. Return a function that waits for the server's reply.

        The function returns False if the answer is lost. For each answer, the proxy searches for the newest copy of the
        half message that the proxy has stored, and then deletes this copy. If this process answered UNKNOWN, the proxy
        would find no copy for a later decision. So UNKNOWN is not sent, and one decision answers all checks of the
        transaction.
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
        """Return the message types of a topic on the server, or None if the server does not have the topic.

        Raises BrokerUnavailable.
        """
        request = client.QueryRouteRequest()
        request.topic.name = self._named(topic)
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
                f"RocketMQ's proxy at {self.client_configuration.rpc_endpoints} did not answer about topic {topic!r}: "
                f"{client.described(error)}. Check that the proxy runs, and that the port is its gRPC port (8081), not "
                f"the port of a broker or a name server."
            ) from error
        return frozenset(kind for queue in answer.message_queues for kind in queue.accept_message_types)


class AnsweringThread:
    """Runs check-back when the server sends a check for this process's producer group.

    `producer_group` is this process's group. If the server sends a check for another group's message, the configuration
    is wrong, and the thread logs an error: two services share a topic, and each service gets checks that only the other
    service can answer.
    """

    def __init__(
        self,
        producer: CheckingProducer,
        broker: Callable[[], Broker],
        producer_group: str,
        checker: Callable[[], Checker],
    ) -> None:
        self._producer = producer
        self._broker = broker
        self._group = producer_group
        self._checker = checker
        self._stop = False
        self._complained: set[str] = set()
        self._unrouted: list[str] = []
        self._thread = threading.Thread(target=self._run, name="outbox-rocketmq-checks", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Tell the thread to end, and return at once. The thread may still be answering checks."""
        with self._producer.arrived:
            self._stop = True
            self._producer.arrived.notify_all()

    def _run(self) -> None:
        due = time.monotonic() + _LOOK_SECONDS
        while True:
            with self._producer.arrived:
                self._producer.arrived.wait_for(
                    lambda: self._stop or self._producer.pushed_groups(), timeout=_LOOK_SECONDS
                )
                groups = self._producer.pushed_groups()
            if self._stop:
                return
            if time.monotonic() >= due:
                client.keep_known(self._producer)
                self._note_routes()
                due = time.monotonic() + _LOOK_SECONDS
            for group in groups:
                self._answer(group)

    def _note_routes(self) -> None:
        """Log each change of the list of topics for which RocketMQ cannot send checks to this process."""
        before, self._unrouted = self._unrouted, client.unrouted(self._producer)
        if self._unrouted and self._unrouted != before:
            logger.error(
                "RocketMQ cannot send this process checks about topics %s: RocketMQ's proxy at %s does not answer, "
                "or does not have these topics. RocketMQ counts checks that no process answers. Start the proxy, or "
                "create the topics with `manage.py outbox_install --create`. The process tries again every %.0f s.",
                ", ".join(self._unrouted),
                self._producer.client_configuration.rpc_endpoints,
                _LOOK_SECONDS,
            )
        elif before and not self._unrouted:
            logger.warning("RocketMQ can send this process checks about topics %s again.", ", ".join(before))

    def _answer(self, group: str) -> None:
        if group != self._group:
            self._complain(group)
            return
        try:
            CheckBack(self._broker(), group, self._checker()).run_once()
        except Exception as error:
            logger.error(
                "answering checks of group %r failed; RocketMQ sends the checks again", group, exc_info=printable(error)
            )

    def _complain(self, group: str) -> None:
        """Leave the checks unanswered, because only the group of the message can answer them.

        Log an error once per group.
        """
        asked = self._producer.claim(group, 500)
        for one in asked:
            # The producer does not send UNKNOWN. This call only removes the check from the producer's memory.
            self._producer.answer(one.transaction_id, Decision.UNKNOWN)
        if group not in self._complained and asked:
            self._complained.add(group)
            logger.error(
                "RocketMQ sent this service (producer group %r) a check about a message of group %r on topic %r. Two "
                "services publish transactional messages on one topic, so each service gets checks that only the other "
                "service can answer, and RocketMQ gives up the transactions. Give each transactional topic one "
                "producer group.",
                self._group,
                group,
                asked[0].message.topic,
            )
