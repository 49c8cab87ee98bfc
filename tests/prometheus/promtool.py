"""Prometheus's own tool, where it is installed: it parses rules, and runs them on series that a test gives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outbox.contrib.prometheus.rules import ALERTS

# The package `prometheus` of Debian has it.
PROGRAM = os.environ.get("PROMTOOL") or shutil.which("promtool")


def check(rules: Path) -> None:
    """They parse."""
    assert PROGRAM is not None
    subprocess.run([PROGRAM, "check", "rules", str(rules)], check=True, capture_output=True)


def fires(folder: Path, samples: Mapping[str, float], alert: str, expected: list[dict[str, Any]]) -> None:
    """After ten minutes of these samples the alert fires as expected: label sets and annotations, and nothing else."""
    assert PROGRAM is not None
    case = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": f"{value:g}x10"} for name, value in samples.items()],
                "alert_rule_test": [{"eval_time": "10m", "alertname": alert, "exp_alerts": expected}],
            }
        ],
    }
    # JSON is YAML.
    (folder / "case.yml").write_text(json.dumps(case))
    done = subprocess.run(
        [PROGRAM, "test", "rules", str(folder / "case.yml")], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
