"""The thread of a producing process that answers the server's checks.

RocketMQ sends a check to any producer that has used the topic, in any process, and counts unanswered checks. So each
producing process must answer; it cannot leave the checks to a worker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from outbox.checkback import CheckBack
from outbox.ports import Broker, Checker
from outbox.rocketmq import client
from outbox.rocketmq.producer import CheckingProducer
from outbox.transaction import Decision

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 5.0


class AnsweringThread:
    """Runs check-back for every producer group that the server asks about and `checker` can answer for.

    `producer_group` is this process's group. A check for another group's message is a configuration error: two services
    share a topic and use up each other's checks. A log line says so.
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
        """Ask the thread to end; does not wait for an answer in progress."""
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
        """Log each change of the topics that RocketMQ cannot ask this process about."""
        before, self._unrouted = self._unrouted, client.unrouted(self._producer)
        if self._unrouted and self._unrouted != before:
            logger.error(
                "RocketMQ cannot ask this process about topics %s: RocketMQ's proxy at %s does not answer, or has "
                "no such topic. RocketMQ counts checks that no process answers. The process tries again every %.0f "
                "s; start the proxy, or create the topics with `manage.py outbox_install --create`.",
                ", ".join(self._unrouted),
                self._producer.client_configuration.rpc_endpoints,
                _LOOK_SECONDS,
            )
        elif before and not self._unrouted:
            logger.warning("RocketMQ can ask this process about topics %s now.", ", ".join(before))

    def _answer(self, group: str) -> None:
        if group != self._group:
            self._complain(group)
            return
        try:
            CheckBack(self._broker(), group, self._checker()).run_once()
        except Exception:
            logger.exception("answering checks of group %r failed; RocketMQ asks again", group)

    def _complain(self, group: str) -> None:
        """Answer UNKNOWN, because only the message's own group can answer. Log it once per process."""
        asked = self._producer.claim(group, 500)
        for one in asked:
            # UNKNOWN is not sent.
            self._producer.answer(one.transaction_id, Decision.UNKNOWN)
        if group not in self._complained and asked:
            self._complained.add(group)
            logger.error(
                "RocketMQ asked this service (producer group %r) about a message of group %r on topic %r. Two "
                "services publish transactional messages on one topic and use up each other's checks, so that "
                "RocketMQ stops asking: give each transactional topic one producer group.",
                self._group,
                group,
                asked[0].message.topic,
            )
