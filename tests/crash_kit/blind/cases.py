"""The crash tests of the forty handlers, as a project has them; run by test_blind.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox.contrib.crash_kit.kit import CrashKit
from tests.crash_kit.blind import correct, faulty, outside
from tests.crash_kit.blind.names import CASES, Case

pytest_plugins = ["outbox.contrib.crash_kit.pytest_plugin"]


@pytest.fixture(autouse=True)
def services(outbox_crashes: CrashKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The systems around the shop keep their files in the test's folder. Each of their acts is recorded."""
    monkeypatch.setenv("SHOP_OUTSIDE", str(tmp_path))
    original = outside.Service.call

    def call(self: outside.Service, what: str, key: str = "") -> str:
        answer = original(self, what, key)
        outbox_crashes.record(self.name, what)
        return answer

    monkeypatch.setattr(outside.Service, "call", call)


@pytest.mark.django_db(transaction=True, databases=["default", "broker", "reports"])
@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_case(case: Case, outbox_crashes: CrashKit) -> None:
    module = faulty if case.is_faulty else correct

    def scenario() -> None:
        outside.clear()
        getattr(module, f"arrange_{case.name}")()
        getattr(module, f"act_{case.name}")()

    outbox_crashes(
        scenario,
        getattr(module, f"check_{case.name}"),
        groups=case.groups,
        kill_scenario=case.kill_scenario,
        shuffled=True,
        duplicates=True,
    )
