"""Endpoints that answer 410: disabled until an operator enables them, through kills, beside other endpoints."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db.utils import DatabaseError
from django.test import Client

from outbox import hooks
from outbox.contrib.django import publish
from outbox.contrib.django.database.aliases import alias_conninfo
from outbox.contrib.django.models import OperatorAction
from outbox.contrib.django.operations.watching import look
from outbox.contrib.forwarding.endpoints import ForwardEndpoints, enable, list_endpoints
from outbox.contrib.forwarding.models import ForwardEndpoint
from outbox.contrib.forwarding.running import forward_once
from outbox.contrib.forwarding.sinks.sink import EndpointGone
from outbox.errors import ServiceUnavailable
from tests.django.broker_world import NOWHERE, World, new_world
from tests.django.conftest import point_alias
from tests.django.operators import ALL, client_of, make_user
from tests.django.processes import process
from tests.django.support import sequence
from tests.sinks.receiver import SECRET, Answer, Request, serving
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("databases", "no_subscribers")


class Receivers:
    """Two endpoints. Requests to /billing are answered with `status`."""

    def __init__(self) -> None:
        self.status = 410
        self.billing: list[str] = []
        self.shipping: list[str] = []
        self.forward: dict[str, Any] = {}

    def respond(self, request: Request) -> Answer:
        of_billing = request.headers["x-endpoint"] == "billing"
        (self.billing if of_billing else self.shipping).append(json.loads(request.body)["number"])
        return Answer(self.status if of_billing else 204)


@pytest.fixture
def receivers(outbox_settings: Callable[..., None]) -> Iterator[Receivers]:
    found = Receivers()
    with serving(found.respond) as port:
        for group in ("billing", "shipping"):
            options = {
                "url": f"http://127.0.0.1:{port}/",
                "secrets": [SECRET],
                "allow_private": True,
                "allow_http": True,
                "headers": {"X-Endpoint": group},
            }
            found.forward[group] = {"topics": ["orders"], "sink": "webhook", "options": options}
        outbox_settings(FORWARD=found.forward)
        yield found


def place(*numbers: str) -> None:
    for number in numbers:
        publish("orders", {"number": number}, key="one queue", at_once=True)
    sequence()


def waiting(world: World) -> list[tuple[Any, ...]]:
    """Attempts that were used up, for messages that wait."""
    return world.sql("SELECT 1 FROM outbox.dead_letter") + world.sql("SELECT 1 FROM outbox.scheduled")


def command(*arguments: str) -> str:
    out = StringIO()
    call_command("outbox_endpoint", *arguments, stdout=out)
    return out.getvalue()


def shown(group: str) -> dict[str, Any]:
    [found] = [one for one in json.loads(command("list", "--json")) if one["endpoint"] == group]
    return dict(found)


def conditions() -> set[str]:
    return {one.name for one in look().verdict.conditions}


def test_messages_wait_while_the_endpoint_is_disabled_and_arrive_after_it_is_enabled(
    receivers: Receivers, outbox_settings: Callable[..., None]
) -> None:
    with new_world(lambda **of: outbox_settings(FORWARD=receivers.forward, **of)) as world:
        place("1", "2")
        forward_once()
        assert receivers.billing == ["1"], "one request, whose answer disables the endpoint"
        assert receivers.shipping == ["1", "2"]
        state = shown("billing")
        assert state["disabled_at"] and "answered 410" in state["disabled_reason"]
        assert "endpoint_disabled" in conditions()
        place("3")
        forward_once()
        assert receivers.billing == ["1"], "no further request"
        assert receivers.shipping == ["1", "2", "3"]
        assert shown("shipping")["disabled_at"] is None
        receivers.status = 204
        forward_once()
        assert receivers.billing == ["1"], "until an operator enables it"
        assert waiting(world) == [], "no attempt is used up"
        assert "disabled 2" in command("list") and "webhook" in command("list")
        command("enable", "billing", "--no-input", "--reason", "it is back")
        assert "endpoint_disabled" not in conditions()
        assert OperatorAction.objects.get().action == "enable_endpoint"
        forward_once()
        assert receivers.billing == ["1", "1", "2", "3"]
        assert shown("billing")["disabled_at"] is None


def test_an_endpoint_that_is_still_gone_is_disabled_again(receivers: Receivers) -> None:
    place("1")
    forward_once()
    assert enable("billing") and not enable("billing")
    forward_once()
    assert receivers.billing == ["1", "1"]
    assert shown("billing")["disabled_at"]


def test_a_name_that_is_not_known_is_refused(receivers: Receivers) -> None:
    forward_once()
    with pytest.raises(CommandError, match="known endpoints: billing, shipping"):
        command("enable", "biling", "--no-input")


def test_a_late_answer_does_not_disable_an_endpoint_that_was_enabled_meanwhile() -> None:
    process_endpoints = ForwardEndpoints(["billing"])
    process_endpoints.sync()
    endpoint = process_endpoints.of("billing")
    before = endpoint.admit()
    endpoint.disable(before, EndpointGone("answered\0410"))
    process_endpoints.sync()
    with pytest.raises(ServiceUnavailable, match="outbox_endpoint enable billing"):
        endpoint.admit()
    enable("billing")
    process_endpoints.sync()
    assert endpoint.admit() == before + 1
    endpoint.disable(before, EndpointGone("answered 410"))
    process_endpoints.sync()
    assert endpoint.admit() == before + 1
    endpoint.disable(before + 1, EndpointGone("answered 410"))
    process_endpoints.sync()
    with pytest.raises(ServiceUnavailable):
        endpoint.admit()


def test_while_the_database_is_away_the_last_known_state_counts_and_no_answer_is_lost() -> None:
    unread, known = ForwardEndpoints(["billing"]), ForwardEndpoints(["billing"])
    known.sync()
    url = alias_conninfo("default")
    point_alias("default", NOWHERE)
    try:
        for endpoints in (unread, known):
            with pytest.raises(DatabaseError):
                endpoints.sync()
        known.of("billing").disable(known.of("billing").admit(), EndpointGone("answered 410"))
        with pytest.raises(DatabaseError):
            known.sync()
        with pytest.raises(ServiceUnavailable, match="has not been read"):
            unread.of("billing").admit()
    finally:
        point_alias("default", url)
    known.sync()
    [row] = list_endpoints()
    assert row.disabled_at is not None and row.disabled_reason == "answered 410"


def test_every_fault_point_is_armed() -> None:
    # The tests in tests/sinks, and the next one.
    armed = {"forward.after_acknowledgement", "forward.before_disabled"}
    assert {name for name in hooks.fault_points if name.startswith("forward.")} == armed


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_kill_before_the_flag_is_stored_only_costs_another_request(receivers: Receivers) -> None:
    settings = {"FORWARD": receivers.forward, "LEASE_SECONDS": 2}
    role = ["-m", "django", "outbox_worker", "--role", "forward"]
    with process(["-m", "outbox.contrib.django.worker.child", "broker"], quiet=True):
        publish("orders", {"number": "1"}, key="one queue", at_once=True)
        with process(role, outbox=settings, faults="forward.before_disabled=kill", quiet=True) as killed:
            assert killed.wait(90) == -signal.SIGKILL
        assert receivers.billing == ["1"]
        assert ForwardEndpoint.objects.get(group="billing").disabled_at is None
        with process(role, outbox=settings, quiet=True) as forwarding:

            def is_disabled() -> bool:
                return ForwardEndpoint.objects.filter(group="billing", disabled_at__isnull=False).exists()

            eventually(is_disabled, within_seconds=90, what="the second 410")
            assert receivers.billing == ["1", "1"]
            publish("orders", {"number": "2"}, key="one queue", at_once=True)
            eventually(lambda: "2" in receivers.shipping, within_seconds=60, what="the other endpoint")
            receivers.status = 204
            # A process that is killed and started again finds the flag.
            forwarding.kill()
            forwarding.wait()
        with process(role, outbox=settings, quiet=True):
            publish("orders", {"number": "3"}, key="one queue", at_once=True)
            eventually(lambda: "3" in receivers.shipping, within_seconds=90, what="the other endpoint, again")
            assert receivers.billing == ["1", "1"]
            enable("billing")
            eventually(lambda: receivers.billing[2:] == ["1", "2", "3"], within_seconds=90, what="what has waited")


def test_the_page_shows_the_endpoints_and_offers_to_enable_one(receivers: Receivers) -> None:
    operator: Client = client_of(make_user(*ALL))
    place("1")
    forward_once()
    page = operator.get("/outbox/endpoints/").content.decode()
    assert ">disabled<" in page and ">enabled<" in page and "answered 410" in page
    assert page.count("Enable …") == 1
