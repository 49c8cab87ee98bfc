"""Fault points: off they do nothing, armed they hit the named step."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox import hooks
from outbox.errors import ConfigurationError
from outbox.utils import faults


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm("")


def test_raise_on_the_named_visit_only() -> None:
    faults.arm("producer.after_half=raise@2")
    faults.point("producer.after_half")
    faults.point("producer.before_half")
    with pytest.raises(faults.FaultInjected, match=r"producer\.after_half"):
        faults.point("producer.after_half")
    faults.point("producer.after_half")


@pytest.mark.parametrize("specification", ["nowhere=kill", "producer.after_half=explode", "producer.after_half=kill@x"])
def test_wrong_specification_is_an_error(specification: str) -> None:
    with pytest.raises(ConfigurationError, match="OUTBOX_FAULTS"):
        faults.arm(specification)


def test_kill_by_environment_hits_one_of_many_processes(tmp_path: Path) -> None:
    program = "from outbox.utils.faults import point; point('producer.after_half'); print('survived')"
    environment = {"OUTBOX_FAULTS": f"producer.after_half=kill?{tmp_path / 'marker'}"}
    runs = [
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
        for _ in range(3)
    ]
    assert [run.returncode for run in runs] == [-signal.SIGKILL, 0, 0]
    assert [run.stdout for run in runs] == ["", "survived\n", "survived\n"]


def test_a_part_adds_fault_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hooks.fault_points, "greeting.before_send", None)
    faults.arm("greeting.before_send=raise")
    with pytest.raises(faults.FaultInjected, match=r"greeting\.before_send"):
        faults.point("greeting.before_send")


def test_the_variable_is_checked_when_the_parts_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_FAULTS", "greeting.before_send=kill")
    with pytest.raises(ConfigurationError, match=r"there is no fault point 'greeting\.before_send'"):
        faults.check_environment()
    monkeypatch.setitem(hooks.fault_points, "greeting.before_send", None)
    faults.check_environment()
