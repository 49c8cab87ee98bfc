"""`manage.py check` names options of subscribers whose part is not in INSTALLED_APPS."""

from __future__ import annotations

import pytest
from django.core.checks import run_checks

from outbox.contrib.django import subscriber
from outbox.contrib.django.subscribers import registry
from outbox.contrib.limits import Limits
from outbox.subscription import SubscriptionOption


class Elsewhere(SubscriptionOption):
    """An option of a part that no project turns on."""

    def __repr__(self) -> str:
        return "Elsewhere()"


@pytest.fixture(autouse=True)
def no_other_subscribers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_subscribers", {})


def test_an_option_of_a_part_that_is_off_is_an_error() -> None:
    @subscriber("orders", group="on", options=[Limits(running=1)])
    def on(_: object) -> None: ...

    @subscriber("orders", group="off", options=[Elsewhere()])
    def off(_: object) -> None: ...

    found = [one for one in run_checks() if one.id == "outbox.E042"]
    assert [(one.msg.partition(" has ")[2], one.hint) for one in found] == [
        (
            "the option Elsewhere() of a part that is not in INSTALLED_APPS.",
            "Add 'tests.django' to INSTALLED_APPS, or remove the option.",
        )
    ]
