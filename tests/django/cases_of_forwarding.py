"""The action on endpoints, for test_actions.py."""

from __future__ import annotations

from django.utils import timezone

from outbox.contrib.forwarding.models import ForwardEndpoint
from tests.django.broker_world import World
from tests.django.test_actions import Given, case


def endpoint_states(world: World) -> list[tuple[str, bool, int]]:
    return [(one.group, one.disabled_at is not None, one.generation) for one in ForwardEndpoint.objects.all()]


@case("enable_endpoint", endpoint_states)
def _enable_endpoint(world: World) -> Given:
    ForwardEndpoint.objects.all().delete()
    ForwardEndpoint.objects.create(group="billing", disabled_at=timezone.now(), disabled_reason="answered 410")
    return {"group": "billing"}
