"""The events of the sample fit its committed contracts, in both versions of the deployment that the demo shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
CODE: Final = """
from dataclasses import dataclass
from pathlib import Path
import sample_project.events
from outbox.events import declaration
from outbox.events.contract import check, declared_contracts, read_contracts

CHANGED
for problem in check(read_contracts(Path("sample_project/contracts")), declared_contracts()):
    print(problem)
"""
# The type of today without its number for the change: the control.
OTHER: Final = """
declaration.forget()
@declaration.event("order.paid", version=2, key="order_id")
@dataclass(frozen=True)
class OrderPaid:
    order_id: str
"""


def problems(changed: str = "", version: str = "2") -> list[str]:
    """What `outbox_contract check` says about the events of the sample, in a process of its own."""
    found = subprocess.run(
        [sys.executable, "-c", CODE.replace("CHANGED", changed)],
        env={**os.environ, "SAMPLE_ORDER_PAID": version},
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return found.stdout.splitlines()


def test_the_events_of_the_sample_fit_its_contracts() -> None:
    assert problems() == []


def test_control_a_change_without_a_new_version_is_found() -> None:
    assert any("field order_id" in line for line in problems(OTHER))


def test_the_version_before_is_committed_and_old_code_is_refused_after_the_new_one() -> None:
    committed = json.loads((ROOT / "sample_project/contracts/order.paid.json").read_text(encoding="utf-8"))
    assert list(committed["versions"]) == ["1", "2"]
    assert ["declares no version above 1" in line for line in problems(version="1")] == [True]
