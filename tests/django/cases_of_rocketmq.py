"""The actions on messages of the relay, for test_actions.py."""

from __future__ import annotations

from django.utils import timezone

from outbox.contrib.rocketmq.models import RelayEntry
from tests.django.broker_world import World
from tests.django.test_actions import SOME_ID, Given, case


def relay_states(world: World) -> list[tuple[str, str]]:
    return [(str(one.message_id), one.state) for one in RelayEntry.objects.all()]


def parked(world: World) -> Given:
    RelayEntry.objects.all().delete()
    now = timezone.now()
    row = RelayEntry(line=1, message_id=SOME_ID, transaction_id=SOME_ID, topic="steps", headers={}, size=0, born_at=now)
    row.taken_at = row.parked_at = now
    row.save()
    return {"message": str(SOME_ID)}


@case("retry_relayed", relay_states)
def _retry_relayed(world: World) -> Given:
    return parked(world)


@case("discard_relayed", relay_states)
def _discard_relayed(world: World) -> Given:
    return parked(world)
