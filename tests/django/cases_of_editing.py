"""The actions on the content and the topic of dead letters, for test_actions.py."""

from __future__ import annotations

from tests.django.broker_world import World
from tests.django.test_actions import LETTERS, Given, case, letters, rows


@case("edit", rows("SELECT body, headers FROM outbox.commit_log ORDER BY log_id"))
def _edit(world: World) -> Given:
    return {"group": "mail", "ids": letters(world)[:1], "patch": '{"amount": 5}', "headers": '{"tenant": "7"}'}


@case("redirect", lambda world: (LETTERS(world), world.sql("SELECT count(*) FROM outbox.commit_log")))
def _redirect(world: World) -> Given:
    return {"group": "mail", "ids": letters(world)[:1], "to": "payments"}
