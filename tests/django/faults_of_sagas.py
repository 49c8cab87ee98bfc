"""Faults of sagas, made for real; each is named as its condition."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

from django.utils import timezone

from outbox.contrib.saga.steps import Saga, SagaProgress, SagaState
from tests.django.broker_world import World, fault
from tests.django.shop.models import Effect


@fault("warning", storms=("restore of the broker",), seconds=9000)
def saga_stalled(world: World) -> None:
    """The broker has lost the message of a saga's step."""
    Saga("booking", Effect, topic="bookings")
    long_ago = timezone.now() - timedelta(minutes=5)
    place = {"saga": "booking", "record": "1", "state": SagaState.RUNNING, "step": "reserve_room"}
    progress = SagaProgress.objects.create(**place, changed_at=long_ago, message_id=uuid4())
    world.stack.callback(progress.delete)
