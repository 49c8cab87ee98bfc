"""The crash kit on forty handlers of an author who had not seen it: it finds each fault, and no fault in the others.

In the first trial, the kit found 20 of 20 faults, each but one with the line of the handler, and 16 of 20 correct
handlers finished without a report; the other four met limits of the kit and of the time. With the load of other
programs, a case takes 15 to 330 s, so the cases have the mark `soak`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.crash_kit.blind.names import CASES, Case
from tests.crash_kit.running import failures, urls

SECONDS: Final = 1800
pytestmark = [pytest.mark.soak, pytest.mark.timeout(SECONDS)]


@pytest.fixture(scope="module")
def outcomes(
    server_url: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, str]:
    """The failure of each selected case, '' for a case that passes."""
    items = [item for item in request.session.items if item.path == Path(__file__)]
    cases = [item.callspec.params["case"] for item in items]  # type: ignore[attr-defined]
    variables = {
        "DJANGO_SETTINGS_MODULE": "tests.crash_kit.blind.settings",
        **urls(server_url, ("default", "broker", "reports")),
    }
    file = Path(__file__).with_name("cases.py")
    chosen = [f"{file}::test_case[{case.id}]" for case in cases]
    found = failures(chosen, tmp_path_factory.mktemp("blind"), variables, within_seconds=SECONDS)
    return {case.id: found[f"test_case[{case.id}]"] for case in cases}


def named(*, is_faulty: bool) -> list[object]:
    return [pytest.param(case, id=case.id) for case in CASES if case.is_faulty == is_faulty]


@pytest.mark.parametrize("case", named(is_faulty=True))
def test_a_fault_is_found_at_its_line(case: Case, outcomes: dict[str, str]) -> None:
    assert "CrashTestFailed" in outcomes[case.id], outcomes[case.id]
    assert case.line in outcomes[case.id]


@pytest.mark.parametrize("case", named(is_faulty=False))
def test_a_correct_handler_passes(case: Case, outcomes: dict[str, str]) -> None:
    assert outcomes[case.id] == ""
