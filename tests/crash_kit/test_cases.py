"""The crash kit finds every planted fault, names its line, and finds nothing in correct handlers.

One run of pytest has all cases that this run needs, as a project has its crash tests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.crash_kit.names import ALL, VARIABLE
from tests.crash_kit.running import failures, urls

# All others together take a quarter of an hour. A correct case has a run for each of its steps.
SLOW: Final = (
    "faulty.publish_after_commit",
    "correct.row",
    "faulty.charge_after_row",
    "faulty.last_write_wins",
    "faulty.row_by_a_faster_thread",
    "correct.claimed_charge",
)
SECONDS: Final = 1800
ALIASES: Final = ("default", "broker", "other")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS)]


@pytest.fixture(scope="session")
def outcomes(
    server_url: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, str]:
    """The failure of each selected case and of each option, '' for a case that passes."""
    cases = sorted({item.callspec.params["case"] for item in request.session.items if _is_case(item)})  # type: ignore[attr-defined]
    variables = {
        "DJANGO_SETTINGS_MODULE": "tests.crash_kit.settings",
        VARIABLE: ",".join(cases),
        **urls(server_url, ALIASES),
    }
    file = Path(__file__).with_name("cases.py")
    found = failures([str(file)], tmp_path_factory.mktemp("cases"), variables, within_seconds=SECONDS)
    return {name.removeprefix("test_case[").rstrip("]"): failure for name, failure in found.items()}


def _is_case(item: pytest.Item) -> bool:
    return item.path == Path(__file__) and "case" in getattr(getattr(item, "callspec", None), "params", {})


def marked(cases: Sequence[str]) -> list[object]:
    return [pytest.param(case, marks=() if case in SLOW else pytest.mark.soak) for case in cases]


@pytest.mark.parametrize("case", marked([case for case in ALL if case.startswith("faulty.")]))
def test_a_fault_is_found_at_its_line(case: str, outcomes: dict[str, str]) -> None:
    assert "CrashTestFailed" in outcomes[case], outcomes[case]
    assert ALL[case] in outcomes[case]


@pytest.mark.parametrize("case", marked([case for case in ALL if case.startswith("correct.")]))
def test_a_correct_handler_passes(case: str, outcomes: dict[str, str]) -> None:
    assert outcomes[case] == ""


def test_only_handlers_are_killed(outcomes: dict[str, str]) -> None:
    assert outcomes["test_only_handlers_are_killed"] == ""


def test_a_step_that_is_not_reached_again_is_named(outcomes: dict[str, str]) -> None:
    assert outcomes["test_a_step_that_is_not_reached_again"] == ""


PAGE: Final = Path(__file__).resolve().parent.parent.parent / "docs" / "testing.md"
HEAD: Final = """
from django.core import mail
from django.core.mail import send_mail
from django.db import transaction

from outbox import Delivery
from outbox.contrib.django import publish, subscriber
from tests.crash_kit.shop.models import Order, Payment

pytest_plugins = ["outbox.contrib.crash_kit.pytest_plugin"]


"""


def example(name: str) -> str:
    [found] = re.findall(rf"<!-- example: {name} -->\n```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


def test_the_example_of_the_page(server_url: str, tmp_path: Path) -> None:
    file = tmp_path / "test_shop.py"
    file.write_text(f"{HEAD}{example('handler')}\n\n{example('test')}")
    variables = {"DJANGO_SETTINGS_MODULE": "tests.crash_kit.settings", VARIABLE: "page.order.placed"}
    [failure] = failures(
        [str(file)], tmp_path, {**variables, **urls(server_url, ALIASES)}, within_seconds=SECONDS
    ).values()
    first, place, *_ = example("report").splitlines()
    assert first in failure
    assert place.split("`")[1] in failure
    assert "outside of the databases, this process had done:" in failure
    assert "assert 2 <= 1" in failure
