"""Fourteen groups of one topic, with eight threads each, for the worker processes of test_max_connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from outbox import Delivery
from outbox.contrib.django import ClaimedDelivery, subscriber
from tests.django.fourteen import GROUPS
from tests.django.shop.models import Effect

# Long enough for many handlers to run at the same time.
_SECONDS: Final = 0.01


def _effect(group: str, delivery: Any) -> Effect:
    return Effect(number=f"{group} {delivery.key} {delivery.attempt}")


def _single(group: str) -> Callable[[Delivery], None]:
    def handle(delivery: Delivery) -> None:
        _effect(group, delivery).save()
        time.sleep(_SECONDS)

    return handle


def _batch(group: str) -> Callable[[Sequence[Delivery]], None]:
    def handle(deliveries: Sequence[Delivery]) -> None:
        Effect.objects.bulk_create(_effect(group, delivery) for delivery in deliveries)
        time.sleep(_SECONDS)

    return handle


def _outside(group: str) -> Callable[[ClaimedDelivery], None]:
    def handle(delivery: ClaimedDelivery) -> None:
        time.sleep(_SECONDS)
        with delivery.finish():
            _effect(group, delivery).save()

    return handle


for _group in GROUPS[:9]:
    subscriber("orders", group=_group)(_single(_group))
subscriber("orders", group=GROUPS[9], mode="key_ordered")(_single(GROUPS[9]))
subscriber("orders", group=GROUPS[10], mode="orderly")(_single(GROUPS[10]))
subscriber("orders", group=GROUPS[11], batch=10)(_batch(GROUPS[11]))
subscriber("orders", group=GROUPS[12], idempotent=False)(_single(GROUPS[12]))
subscriber("orders", group=GROUPS[13], effects="outside")(_outside(GROUPS[13]))
