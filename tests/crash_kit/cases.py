"""The crash tests of the cases, as a project has them; run by test_cases.py."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from django.db import transaction

from outbox import Delivery
from outbox.contrib.crash_kit.kit import CrashKit
from outbox.contrib.django import publish, subscriber
from tests.crash_kit import outside
from tests.crash_kit.names import CASES
from tests.crash_kit.shop.models import Order, Payment

pytest_plugins = ["outbox.contrib.crash_kit.pytest_plugin"]


@pytest.mark.django_db(transaction=True, databases=["default", "broker", "other"])
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, outbox_crashes: CrashKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside.Service, "record", outbox_crashes.record, raising=False)
    monkeypatch.setattr(outside.Service, "recorded", outbox_crashes.recorded, raising=False)
    kind, _, name = case.partition(".")
    made = getattr(import_module(f"tests.crash_kit.{kind}"), name)(name)
    made.prepare()
    outbox_crashes(made.run, made.check, groups=[name, *made.further], **made.options)
    print(f"{outbox_crashes.runs} runs")


@subscriber("options", group="options")
def store(delivery: Delivery) -> None:
    Payment.objects.create(number=delivery.body["number"])


def test_only_handlers_are_killed(outbox_crashes: CrashKit) -> None:
    def scenario() -> None:
        with transaction.atomic():
            publish("options", {"number": 7})

    def check() -> None:
        assert Payment.objects.get().number == 7

    outbox_crashes(scenario, check, groups=["options"], kill_scenario=False)
    assert any("Payment.objects.create(" in line for step in outbox_crashes.steps for line in step.lines)
    assert not any("publish(" in line for step in outbox_crashes.steps for line in step.lines)


def test_a_step_that_is_not_reached_again(
    outbox_crashes: CrashKit, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def scenario() -> None:
        if not (tmp_path / "visited").exists():
            (tmp_path / "visited").touch()
            Order.objects.create(number=1)

    outbox_crashes(scenario, lambda: None, groups=["options"])
    assert [step.name.split()[0] for step in outbox_crashes.missed] == ["before", "after"]
    assert "2 of 2 steps were not tested" in caplog.text
