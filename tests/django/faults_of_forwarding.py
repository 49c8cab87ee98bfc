"""The fault of forwarding, made for real; it is named as its condition."""

from __future__ import annotations

from outbox.contrib.forwarding.running import forward_once
from tests.django.broker_world import World, fault
from tests.sinks.receiver import SECRET, Answer, serving


@fault("warning")
def endpoint_disabled(world: World) -> None:
    """An endpoint of FORWARD answers 410."""
    with serving(lambda _: Answer(410)) as port:
        options = {"url": f"http://127.0.0.1:{port}/", "secrets": [SECRET], "allow_private": True, "allow_http": True}
        world.change_settings(FORWARD={"billing": {"topics": ["orders"], "sink": "webhook", "options": options}})
        world.publish()
        forward_once()
