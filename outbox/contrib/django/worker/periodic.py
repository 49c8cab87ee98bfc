"""What runs periodically in a service: check-back, pruning of ledger and inbox, and comparing both with the broker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from outbox.broker.transaction.turns import CHECK_BACK
from outbox.contrib.django.ledger.pruning import run_prune
from outbox.contrib.django.operations.comparing import compare_when_due
from outbox.contrib.django.operations.watching import audit_when_due
from outbox.contrib.django.publishing.checkback import check_back, is_my_turn
from outbox.contrib.django.settings.conf import get_settings
from outbox.periodic import PeriodicPass

logger = logging.getLogger(__name__)

PRUNE_INTERVAL_SECONDS: Final = 600.0
# How soon a new life of the broker is noticed; in between a pass is one look.
_LOOK_INTERVAL_SECONDS: Final = 60.0


def passes() -> list[PeriodicPass]:
    """What has to run periodically in a producer service, whoever drives it: a worker's role "check", or Celery beat.

    Each runs when no other process of the service has just begun it. Without PRODUCER_GROUP there is no check-back:
    nothing can be published on the two-phase path.
    """
    settings = get_settings()
    prune = _in_turn("prune", PRUNE_INTERVAL_SECONDS, lambda: asdict(run_prune()))
    # Asked more often than it is due: workers come and go.
    audit_seconds = min(3600.0, settings.audit_interval_seconds)
    compare = _in_turn("compare", _LOOK_INTERVAL_SECONDS, _compared)
    always = [compare, prune, PeriodicPass(name="audit", interval_seconds=audit_seconds, run=audit_when_due)]
    if not settings.producer_group:
        return always
    return [_in_turn(CHECK_BACK, settings.check_interval_seconds, lambda: asdict(check_back())), *always]


def _compared() -> Mapping[str, Any]:
    counts = compare_when_due()
    return {} if counts is None else asdict(counts)


def _in_turn(name: str, interval_seconds: float, work: Callable[[], Mapping[str, Any]]) -> PeriodicPass:
    return PeriodicPass(name=name, interval_seconds=interval_seconds, run=partial(_run, name, interval_seconds, work))


def _run(name: str, interval_seconds: float, work: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    return work() if is_my_turn(name, interval_seconds) else {"left_to": "another process, which has just begun it"}
