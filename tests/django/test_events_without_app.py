"""Without the app 'outbox.contrib.events', the use of an event is refused where it is written."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.house.parts import ROOT

# A process of its own, because the tests of this folder have the app.
_PROGRAM = """
import json, sys

import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["outbox.contrib.django", *sys.argv[1:]],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    OUTBOX={"IN_MEMORY": True, "TOPICS": {"order.paid": {}}},
)
django.setup()
before = sorted(name for name in sys.modules if name.startswith(("outbox.events", "outbox.contrib.events")))

from dataclasses import dataclass

from outbox import Delivery
from outbox.contrib.django import publish, subscriber, transactional_message
from outbox.contrib.django.subscribers.registry import subscribers
from outbox.events import event


@event("order.paid")
@dataclass
class OrderPaid:
    number: int


@dataclass
class Plain:
    number: int


def annotated():
    @subscriber("order.paid", group="one")
    def handle(delivery: Delivery[OrderPaid]) -> None: ...


def named():
    @subscriber(OrderPaid, group="two")
    def handle(delivery: Delivery) -> None: ...


def decorated():
    @transactional_message(OrderPaid, body=lambda: OrderPaid(1))
    def pay() -> None: ...


def undeclared():
    publish(Plain(1), at_once=True)


said = {}
for use in (annotated, named, decorated, lambda: publish(OrderPaid(1), at_once=True), undeclared):
    try:
        use()
        said[use.__name__] = ""
    except Exception as error:
        said[use.__name__] = f"{type(error).__name__}: {error}"
print(json.dumps({"before": before, "said": said, "options": [str(one.subscription.options) for one in subscribers()]}))
"""


def run(*apps: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, *apps], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_each_use_of_an_event_names_the_app_that_is_missing() -> None:
    found = run()
    assert found["before"] == [], "a part that is off costs no import"
    wrong = found["said"].pop("undeclared")
    assert wrong.startswith("UsageError: publish: ") and "neither the name of a topic nor a value" in wrong
    remedy = "OrderPaid is the event 'order.paid', but INSTALLED_APPS lacks 'outbox.contrib.events'."
    assert {name: text.partition(f": {remedy}")[0] for name, text in found["said"].items()} == dict.fromkeys(
        ("annotated", "named", "decorated", "<lambda>"), "ConfigurationError"
    )
    assert "Nothing was published." in found["said"]["<lambda>"]
    assert found["options"] == []


def test_with_the_app_the_same_uses_work() -> None:
    found = run("outbox.contrib.events")
    assert found["said"].pop("undeclared").startswith("UsageError")
    assert set(found["said"].values()) == {""}
    assert found["options"] == ["[Events(OrderPaid)]"] * 2
