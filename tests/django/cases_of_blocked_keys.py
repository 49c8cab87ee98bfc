"""The action on blocked keys, for test_actions.py."""

from __future__ import annotations

from tests.django.broker_world import World
from tests.django.faults_of_blocked_keys import block_a_key
from tests.django.test_actions import Given, case, rows


@case("unblock", rows("SELECT key, state FROM outbox.blocking_message"))
def _unblock(world: World) -> Given:
    block_a_key()
    return {"group": "effects", "topic": "steps", "key": "k"}
