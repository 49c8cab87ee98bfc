"""Apache RocketMQ 5 as the broker (implements outbox.ports.Broker). An unsupported feature raises NotSupported.

docs/engines.md and docs/decisions/120 describe the contract and the differences from the broker in PostgreSQL.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeVar, cast
from uuid import UUID

from outbox.checkback import CheckBack
from outbox.errors import (
    BrokerError,
    BrokerUnavailable,
    InvalidMessage,
    MessageTypeMismatch,
    OutcomeUnknown,
    SendFailed,
    UnknownTopic,
)
from outbox.message import Message, SendReceipt
from outbox.ports import Broker, Checker
from outbox.recall import Recall
from outbox.rocketmq import client
from outbox.rocketmq.address import parse
from outbox.rocketmq.admin import brokers_of
from outbox.rocketmq.declarations import (
    REFUSALS,
    check_topics,
    in_namespace,
    is_relayed,
    topic_problems,
    types_on_server,
    wire_name,
)
from outbox.rocketmq.producer import AnsweringThread, CheckingProducer
from outbox.rocketmq.stranded import ExhaustedChecks, UnaskedHalves
from outbox.rocketmq.wire import CheckProperties, to_wire
from outbox.topic import MessageType, Topic
from outbox.transaction import (
    Answer,
    Check,
    CheckCounts,
    CheckSettings,
    Decision,
    EndStatus,
    EndTransaction,
    HalfTransaction,
    ProducerEpoch,
)
from outbox.utils.faults import point
from outbox.utils.safe_text import printable, shown_text

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_THREADS: Final = 16
# The time limit in seconds for publishing a message again. No caller waits while a message is published again.
_AGAIN_SECONDS: Final = 10.0
_CLOSE_SECONDS: Final = 2.0


class RocketMQBroker:
    """RocketMQ as the broker, with the one producer of this process.

    The first call starts the producer, and any thread may use the producer. If a process forks after the start of its
    producer, the child process cannot use this producer.

    `topics` are the declared topics. The process can use only declared topics. `answering` creates the thread that
    answers the checks. RocketMQ sends a check to any process that has used the topic, so every process that publishes
    must answer checks. Raises ConfigurationError for an invalid address or topic.
    """

    def __init__(
        self,
        url: str,
        topics: Iterable[Topic],
        *,
        check: CheckSettings | None = None,
        timeout_seconds: float = 3.0,
        answering: Callable[[CheckingProducer], AnsweringThread] | None = None,
    ) -> None:
        self.url = url
        self._configuration = client.configuration(url, timeout_seconds=timeout_seconds)
        self._namespace = parse(url).namespace
        self._topics = check_topics(topics)
        self._check = check or CheckSettings()
        self._answering = answering
        self._lock = threading.Lock()
        self._producer: CheckingProducer | None = None
        self._answerer: AnsweringThread | None = None
        self._threads: ThreadPoolExecutor | None = None
        # The decisions of `end_one_way` that the server has not accepted yet.
        self._sent: set[Future[None]] = set()
        self._exhausted: ExhaustedChecks | None = None
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=self._forget)

    # -- sending --------------------------------------------------------------------------------

    def send(
        self,
        messages: Sequence[Message],
        *,
        timeout_seconds: float = 3.0,
        committed: bool = False,
        producer: ProducerEpoch | None = None,
    ) -> list[SendReceipt]:
        """Send messages. If it is unknown whether RocketMQ has stored a message, raises OutcomeUnknown.

        If the caller sends such a message again, RocketMQ may store it twice.
        """
        if producer is not None:
            REFUSALS.refuse("take_over", "a fenced producer")
        if len(messages) > 1:
            REFUSALS.refuse("send", f"{len(messages)} messages for {messages[0].topic!r} in one call")
        return [self._send(message, timeout_seconds, None if committed else False) for message in messages]

    def _send(self, message: Message, timeout_seconds: float, transactional: bool | None) -> SendReceipt:
        topic = self.topic(message.topic)
        topic.check_accepts(message, transactional=transactional)
        if transactional is False and topic.is_fifo and MessageType.TRANSACTION in topic.types:
            raise MessageTypeMismatch(
                f"topic {message.topic!r} is declared FIFO and TRANSACTION: message {message.message_id} would pass "
                "messages of its key that wait for the relay. Nothing was sent. Publish it inside `with "
                "transaction.atomic():`, or declare the topic without TRANSACTION."
            )
        wire = to_wire(message, fifo=topic.is_fifo, namespace=self._namespace)
        producer = self._started()
        receipt = self._within(timeout_seconds, lambda: self._plainly(producer, topic, wire), message)
        return _receipt(message, message.message_id, receipt)

    @staticmethod
    def _plainly(producer: CheckingProducer, topic: Topic, wire: Any) -> Any:
        if topic.types == {MessageType.TRANSACTION}:
            # If a topic has only the type TRANSACTION, the server accepts only transactional messages. The message's
            # local transaction has committed already (a repair), so the code commits the server's transaction at once.
            opened = producer.begin_transaction()
            receipt = producer.send(wire, opened)
            opened.commit()
            return receipt
        return producer.send(wire)

    def check_relayed(self, message: Message) -> bool:
        """Whether the relay must send this message of a local transaction. Raises InvalidMessage.

        The check is early: RocketMQ would reject the message after the local transaction has committed.
        """
        topic = self.topic(message.topic)
        if not is_relayed(topic, message):
            return False
        topic.check_accepts(message, transactional=True)
        to_wire(message, fifo=topic.is_fifo, namespace=self._namespace)
        return True

    def send_half(self, half: HalfTransaction, *, timeout_seconds: float = 3.0) -> list[SendReceipt]:
        """Open one server transaction per message, all with one transaction id. Raises the errors of `send`."""
        if half.producer is not None:
            REFUSALS.refuse("take_over", "a fenced producer")
        for message in half.messages:
            self.topic(message.topic).check_accepts(message, transactional=True)
            if is_relayed(self.topic(message.topic), message):
                REFUSALS.refuse("send_half", f"message {message.message_id} for topic {message.topic!r}")
        wires = [to_wire(message, fifo=False, half=half, namespace=self._namespace) for message in half.messages]
        producer = self._started()
        receipts: list[SendReceipt] = []
        for message, wire in zip(half.messages, wires, strict=True):
            send = partial(producer.send_half, half.transaction_id, wire)
            receipts.append(_receipt(message, half.transaction_id, self._within(timeout_seconds, send, message)))
        return receipts

    def _within(self, seconds: float, send: Callable[[], Any], message: Message) -> Any:
        """Run a request of the library with one deadline for all its attempts.

        The library makes up to three attempts.
        """
        what = f"message {message.message_id} for topic {message.topic!r}"
        try:
            return self._pool().submit(send).result(seconds)
        except client.OF_THE_SERVER as error:
            raise SendFailed(
                f"RocketMQ did not take {what}: {client.described(error)}. If the broker is busy, publish the message "
                "again later. Otherwise check the credentials, the rights and the topic."
            ) from error
        except client.REFUSALS as error:
            raise InvalidMessage(f"RocketMQ refused {what}: {client.described(error)}.") from error
        except BrokerError:
            raise
        except FutureTimeout:
            raise OutcomeUnknown(
                f"{what} was not acknowledged within {seconds:g} s: RocketMQ may or may not have stored "
                "the message. If you roll back the transaction, check-back rolls back the message. If you send a plain "
                "message again, it may be stored twice."
            ) from None
        except Exception as error:
            if "route" in shown_text(error):
                raise self._unrouted(message.topic, error) from error
            raise OutcomeUnknown(
                f"{what}: RocketMQ's proxy failed ({client.described(error)}), and RocketMQ may or may not have stored "
                "the message."
            ) from error

    def _unrouted(self, topic: str, error: Exception) -> Exception:
        try:
            known = self._started().accepted_types(topic)
        except BrokerError as unreachable:
            return BrokerUnavailable(f"{unreachable} Nothing was published.")
        if known is None:
            return UnknownTopic(f"RocketMQ has no topic {topic!r}: create it. Nothing was published.")
        return SendFailed(f"a message for topic {topic!r} could not be sent: {client.described(error)}.")

    # -- deciding -------------------------------------------------------------------------------

    def end(self, ends: Sequence[EndTransaction], *, timeout_seconds: float = 3.0) -> list[EndStatus]:
        """Return ACCEPTED if the server has the decision, and LEFT_TO_CHECK if check-back must find the decision."""
        if not ends:
            return []
        producer = self._started()
        sent = [(end, [*_decided(producer, end)]) for end in ends]
        taken = [[_is_taken(producer, end, one) for one in decisions] for end, decisions in sent]
        return [EndStatus.ACCEPTED if each and all(each) else EndStatus.LEFT_TO_CHECK for each in taken]

    def end_one_way(self, end: EndTransaction) -> None:
        """Send a decision, and return at once. If it is lost, check-back decides the transaction."""
        with self._lock:
            producer = self._producer
        if producer is None:
            # Only the process that has sent a half message can decide it.
            return
        try:
            point("producer.before_end")
            for sent in _decided(producer, end):
                over: Future[None] = Future()
                self._sent.add(over)
                sent.add_done_callback(partial(self._note_end, producer, end, over))
        except Exception as error:
            logger.error(
                "the end message of transaction %s was not sent, check-back will decide the transaction",
                end.transaction_id,
                exc_info=printable(error),
            )

    def _note_end(self, producer: CheckingProducer, end: EndTransaction, over: Future[None], sent: Future[Any]) -> None:
        try:
            if _is_taken(producer, end, sent):
                point("producer.after_end")
        finally:
            self._sent.discard(over)
            over.set_result(None)

    def flush(self, *, within_seconds: float) -> bool:
        """Wait until the decisions before this call are accepted or lost. Return False if this takes longer."""
        return not wait(set(self._sent), within_seconds).not_done

    def hint_one_way(self, transaction_id: UUID) -> None:
        """Do nothing, because RocketMQ sends checks at its own times (transactionTimeOut, transactionCheckInterval)."""

    def claim_checks(self, producer_group: str, *, limit: int = 500) -> list[Check]:
        """Return the checks that this process has received and can still answer."""
        now = datetime.now(UTC)
        claimed = self._started().claim(producer_group, limit)
        return [self._as_check(one, (now - one.born_at).total_seconds()) for one in claimed]

    def _as_check(self, asked: CheckProperties, age_seconds: float) -> Check:
        immunity = self._check.immunity_seconds if asked.immunity_seconds is None else asked.immunity_seconds
        return Check(
            transaction_id=asked.transaction_id,
            producer_group=asked.producer_group,
            ledger_id=asked.ledger_id,
            message=asked.message,
            stored_at=asked.born_at,
            age_seconds=age_seconds,
            checks=asked.checks,
            may_write=age_seconds >= immunity,
        )

    def report_answers(self, producer_group: str, answers: Sequence[Answer]) -> list[EndStatus | None]:
        """Send the decisions. UNKNOWN is not sent, but the server counts the unanswered check.

        After too many checks the server gives up the transaction, and `settle_exhausted` decides it.
        """
        producer = self._started()
        for answer in answers:
            if answer.alarm:
                logger.error("check of %s: %s", answer.transaction_id, answer.detail)
        sent = [producer.answer(answer.transaction_id, answer.decision) for answer in answers]
        return [_status(answer, was_taken()) for answer, was_taken in zip(answers, sent, strict=True)]

    def settle_exhausted(self, producer_group: str, checker: Checker) -> CheckCounts:
        """Ask `checker` about the transactions that RocketMQ gave up.

        Publish the messages of committed transactions again. If the address names no brokers, do nothing, because the
        proxy cannot read these transactions. Raises BrokerError.
        """
        if self._exhausted is None:
            brokers = brokers_of(self.url)
            self._exhausted = ExhaustedChecks(brokers, producer_group, self._as_check, self._publish_again)
        # ExhaustedChecks implements only those functions of the broker port that check-back calls.
        counts = CheckBack(cast(Broker, self._exhausted), producer_group, checker).run_once(max_batches=1)
        self._exhausted.keep()
        if counts.committed or counts.rolled_back:
            logger.warning(
                "RocketMQ gave up the checks of %d transactions of producer group %r. The ledger answered: %d were "
                "committed and are published again, %d were rolled back.",
                counts.claimed,
                producer_group,
                counts.committed,
                counts.rolled_back,
            )
        return counts

    def settle_unasked(self, producer_group: str, checker: Checker) -> CheckCounts:
        """Ask `checker` about the transactions whose checks reach no producer, and send its decisions to the brokers.

        If the address names no brokers, do nothing. A broker that does not answer is left out, so that the transactions
        of the other brokers do not wait for it.
        """
        total = CheckCounts()
        for broker in brokers_of(self.url):
            try:
                # UnaskedHalves implements only those functions of the broker port that check-back calls.
                halves = cast(Broker, UnaskedHalves(broker, self._as_check))
                total += CheckBack(halves, producer_group, checker).run_once(max_batches=1)
            except BrokerError as error:
                logger.warning("the next pass looks for unanswered checks again: %s", error)
        return total

    def _publish_again(self, message: Message) -> None:
        self.send([message], timeout_seconds=_AGAIN_SECONDS, committed=True)

    # -- calls that RocketMQ cannot serve -------------------------------------------------------------

    def take_over(self, producer_group: str, transactional_id: str, *, timeout_seconds: float = 3.0) -> ProducerEpoch:
        REFUSALS.refuse("take_over", "a fenced producer")

    def leftovers(self, producer: ProducerEpoch) -> list[UUID]:
        REFUSALS.refuse("leftovers", "a fenced producer")

    def recall(self, message_ids: Sequence[UUID], *, timeout_seconds: float = 3.0) -> list[Recall]:
        REFUSALS.refuse("recall", "recall")

    def recall_key(self, topic: str, key: str, *, timeout_seconds: float = 10.0) -> list[Recall]:
        REFUSALS.refuse("recall_key", "recall")

    def take_turn(
        self, producer_group: str, name: str, *, interval_seconds: float, rest_seconds: float | None = None
    ) -> bool:
        """Return True, because RocketMQ records no turns. So every process runs the pass."""
        return True

    def notify_decided(self) -> None:
        """Do nothing, because RocketMQ delivers accepted messages itself."""

    def publishing_failed(self, error: Exception) -> None:
        """Do nothing, because RocketMQ's own tools show its status."""

    def publishing_worked(self) -> None:
        """Do nothing, because RocketMQ's own tools show its status."""

    # -- the producer ---------------------------------------------------------------------------

    def topic(self, name: str) -> Topic:
        """Return the declared topic. Raises UnknownTopic."""
        try:
            return self._topics[name]
        except KeyError:
            raise UnknownTopic(
                f"topic {name!r} is not declared: RocketMQ sends a topic's checks only to producers that declare it. "
                "Add it to the declared topics (Django: OUTBOX['TOPICS'])."
            ) from None

    def topic_problems(self) -> Iterator[str]:
        """Yield a text for each declared topic that is missing or wrong on the server.

        The text names the operator's next step.

        Raises BrokerUnavailable.
        """
        producer = self._started()
        for topic in self._topics.values():
            yield from topic_problems(topic, producer.accepted_types(topic.name))

    def unrouted(self) -> list[str]:
        """Return the topics for which RocketMQ cannot send checks to this process.

        Before the first message is sent, the list is empty.
        """
        with self._lock:
            producer = self._producer
        missing = set() if producer is None else set(client.unrouted(producer))
        return sorted(name for name in self._topics if in_namespace(self._namespace, wire_name(name)) in missing)

    def close(self) -> None:
        """Send the queued end messages and stop the producer. The next call starts another producer."""
        self.flush(within_seconds=_CLOSE_SECONDS)
        with self._lock:
            producer, self._producer = self._producer, None
            answerer, self._answerer = self._answerer, None
            threads, self._threads = self._threads, None
        if answerer is not None:
            answerer.stop()
        if threads is not None:
            threads.shutdown(wait=False)
        if producer is not None:
            producer.shutdown()

    def _started(self) -> CheckingProducer:
        with self._lock:
            if self._producer is None:
                client.refuse_after_fork()
                bound = [name for name, one in self._topics.items() if MessageType.TRANSACTION in types_on_server(one)]
                tls = parse(self.url).tls_to_proxy
                producer = CheckingProducer(self._configuration, bound, tls=tls, namespace=self._namespace)
                try:
                    producer.startup()
                except Exception as error:
                    raise BrokerUnavailable(
                        f"RocketMQ's producer did not start: {client.described(error)}. Nothing was published."
                    ) from error
                self._producer = producer
            if self._answering is not None and self._answerer is None:
                answerer = self._answering(self._producer)
                # If the system refuses a thread, the next call tries again.
                answerer.start()
                self._answerer = answerer
            return self._producer

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="outbox-rocketmq")
            return self._threads

    def _forget(self) -> None:
        """Drop the parent's producer in a forked child, because its threads and sockets belong to the parent."""
        self._lock = threading.Lock()
        self._producer = self._answerer = self._threads = None
        self._sent = set()


def is_rejected(error: Exception) -> bool:
    """Whether RocketMQ or its library would reject the message of a failed `send` again, whenever it is sent."""
    cause = error.__cause__
    if isinstance(error, OutcomeUnknown):
        # The library raises such an error, below its own classes, for a message that it cannot encode.
        return isinstance(cause, (ValueError, TypeError, struct.error))
    return isinstance(error, InvalidMessage)


def _receipt(message: Message, transaction_id: UUID, receipt: Any) -> SendReceipt:
    return SendReceipt(
        message_id=message.message_id,
        transaction_id=transaction_id,
        topic=message.topic,
        position=str(receipt.message_id),
    )


def _decided(producer: CheckingProducer, end: EndTransaction) -> Iterator[Future[Any]]:
    """Send the decision for each half message of the transaction, if this process has sent the half message."""
    for half in producer.take_open(end.transaction_id):
        yield producer.decide(half, end.decision)


def _is_taken(producer: CheckingProducer, end: EndTransaction, sent: Future[Any]) -> bool:
    try:
        producer.taken(sent)
    except Exception as error:
        logger.info(
            "the end message of transaction %s was lost, check-back will decide the transaction: %s",
            end.transaction_id,
            client.described(error),
        )
        return False
    return True


def _status(answer: Answer, was_taken: bool) -> EndStatus | None:
    if answer.decision is Decision.UNKNOWN:
        return None
    return EndStatus.ACCEPTED if was_taken else EndStatus.LEFT_TO_CHECK
