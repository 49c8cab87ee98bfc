"""The action on the content of dead letters, for test_actions.py."""

from __future__ import annotations

from tests.django.broker_world import World
from tests.django.test_actions import Given, case, letters, rows


@case("edit", rows("SELECT body, headers FROM outbox.commit_log ORDER BY log_id"))
def _edit(world: World) -> Given:
    return {"group": "mail", "ids": letters(world)[:1], "patch": '{"amount": 5}', "headers": '{"tenant": "7"}'}
