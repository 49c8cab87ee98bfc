"""The sample's handlers are right even if their process is killed at any step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash_kit.running import failures

SECONDS = 900


@pytest.mark.timeout(SECONDS)
@pytest.mark.soak
def test_the_samples_handlers(sample_environment: dict[str, str], tmp_path: Path) -> None:
    variables = {
        **sample_environment,
        "SAMPLE_SERVER_URL": sample_environment["OUTBOX_POSTGRES_URL"],
        "DJANGO_SETTINGS_MODULE": "sample_project.settings",
    }
    file = Path(__file__).with_name("crash_cases.py")
    assert set(failures([str(file)], tmp_path, variables, within_seconds=SECONDS).values()) == {""}
