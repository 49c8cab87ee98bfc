"""Prometheus's own tool, where it is installed: it parses rules, and runs them on series that a test gives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.house.alerts import ALERTS

# The package `prometheus` of Debian has it.
PROGRAM = os.environ.get("PROMTOOL") or shutil.which("promtool")


def check(rules: Path) -> None:
    """They parse."""
    assert PROGRAM is not None
    subprocess.run([PROGRAM, "check", "rules", str(rules)], check=True, capture_output=True)


Samples = Mapping[str, float | str]


def fires(folder: Path, alert: str, *cases: tuple[Samples, list[dict[str, Any]]]) -> None:
    """After ten minutes of its samples the alert fires as each case expects: label sets and annotations, nothing else.

    A sample is a constant, or a value for each minute in Prometheus's notation, such as `2x5 stale _x4`.
    """
    tests = [
        (samples, {"alert_rule_test": [{"eval_time": "10m", "alertname": alert, "exp_alerts": expected}]})
        for samples, expected in cases
    ]
    _test(folder, tests, rule_files=[str(ALERTS)])


def fire(folder: Path, samples: Samples, expected: Mapping[str, list[dict[str, Any]]]) -> None:
    """The same for several alerts with the same samples: alert -> what is expected of it."""
    asked = [
        {"eval_time": "10m", "alertname": alert, "exp_alerts": alerts} for alert, alerts in sorted(expected.items())
    ]
    _test(folder, [(samples, {"alert_rule_test": asked})], rule_files=[str(ALERTS)])


def _test(folder: Path, tests: Sequence[tuple[Samples, Mapping[str, Any]]], **files: Any) -> None:
    assert PROGRAM is not None
    case = {
        **files,
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": _series(samples), **wanted} for samples, wanted in tests],
    }
    # JSON is YAML.
    (folder / "case.yml").write_text(json.dumps(case))
    done = subprocess.run(
        [PROGRAM, "test", "rules", str(folder / "case.yml")], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _series(samples: Samples) -> list[dict[str, str]]:
    return [
        {"series": name, "values": value if isinstance(value, str) else f"{value:g}x10"}
        for name, value in samples.items()
    ]
