"""Check-back of this service's producer group, and whose turn a periodic pass of it is."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from outbox.broker.postgres import PostgresBroker
from outbox.broker.transaction.turns import CHECK_BACK
from outbox.checkback import CheckBack
from outbox.contrib.django.engine.broker import get_broker
from outbox.contrib.django.ledger.ledger_checker import LedgerChecker
from outbox.contrib.django.settings.conf import get_settings
from outbox.errors import BrokerError
from outbox.transaction import CheckCounts

if TYPE_CHECKING:
    from outbox.rocketmq.broker import RocketMQBroker

logger = logging.getLogger(__name__)


def run_check_back(*, max_batches: int = 100, parked: bool = False) -> CheckCounts:
    """Answer everything the broker asks this producer group now. Any number of processes may do so at once.

    `parked` asks about the group's parked transactions as well, whenever their turn would be. Raises
    ConfigurationError without PRODUCER_GROUP, and BrokerError when the broker cannot be asked.
    """
    is_my_turn(CHECK_BACK, get_settings().check_interval_seconds, rest_seconds=0)
    if parked:
        get_broker().resume_checks(get_settings().required_producer_group())
    return check_back(max_batches=max_batches)


def check_back(*, max_batches: int = 100) -> CheckCounts:
    """One pass of check-back, whosever turn it is; raises as `run_check_back` does."""
    group = get_settings().required_producer_group()
    broker = get_broker()
    return CheckBack(broker, group, LedgerChecker()).run_once(max_batches=max_batches)


def settle_exhausted() -> CheckCounts:
    """Decide by the ledger what RocketMQ gave up asking about; nothing on another engine. Raises BrokerError.

    Two processes that do so at once publish twice, which the inbox removes.
    """
    settings, broker = get_settings(), get_broker()
    if not settings.is_rocketmq:
        return CheckCounts()
    return cast("RocketMQBroker", broker).settle_exhausted(settings.required_producer_group(), LedgerChecker())


def is_my_turn(name: str, interval_seconds: float, *, rest_seconds: float | None = None) -> bool:
    """Whether the periodic pass `name` is this process's to run now, and note that it begins.

    Also where that cannot be asked: a pass too many is harmless.
    """
    group, broker = get_settings().producer_group, get_broker()
    if not group or not isinstance(broker, PostgresBroker):
        return True
    try:
        return broker.take_turn(group, name, interval_seconds=interval_seconds, rest_seconds=rest_seconds)
    except BrokerError as error:
        logger.warning("whose turn %s is cannot be asked, it runs here: %s", name, error)
        return True
